"""`OneModel`, a server's only model: it is loaded at the start, and stays until the end."""

from __future__ import annotations

import contextlib
import gc
import time

from octavo.base.errors import EngineUnavailableError
from octavo.server.app import create_server_app
from octavo.server.engine.generation import EngineState
from octavo.server.http.access_control import App
from octavo.server.http.tenants import Tenants
from octavo.server.log_lines import log_event
from octavo.server.served_model import ServedModel, describe_engine, log_choices


class OneModel:
    """Serves one model: see `octavo.server.server.Served`."""

    def __init__(self, model: ServedModel):
        self.model = model
        self._started = time.monotonic()

    async def create_app(self, tenants: Tenants) -> App:
        self._started = time.monotonic()
        self.model.launch()
        return create_server_app(await self.model.prepare(), tenants)

    async def start(self, url: str) -> None:
        self.model.observe()
        with contextlib.suppress(EngineUnavailableError):  # stopped before it began
            await self.model.ready()
            gc.collect()
            gc.freeze()  # to look at all modules and tokens takes longer than a token
            self._announce(url)

    async def after_start(self) -> None:
        if self.model.engine.state is EngineState.READY:
            await self.model.predict_steps()

    def _announce(self, url: str) -> None:
        name, facts = self.model.identity.names[0], self.model.engine.facts
        log_choices(facts)
        seconds = time.monotonic() - self._started
        info = {key: value for key, value in facts.info.items() if value is not None}
        log_event(
            "ready",
            f"{name} is ready on {url} after {seconds:.1f} s ({describe_engine(facts)})",
            {"url": url, "model": name, "seconds": round(seconds, 3), **info},
        )

    @property
    def num_unfinished(self) -> int:
        return self.model.engine.num_unfinished

    @property
    def num_viewers(self) -> int:
        return self.model.steps.num_viewers

    @property
    def has_given_up(self) -> bool:
        return self.model.engine.has_given_up

    async def wait_until_given_up(self) -> None:
        await self.model.engine.wait_until_given_up()

    def end_streams(self) -> None:
        self.model.steps.end()

    async def stop(self) -> None:
        await self.model.stop()
