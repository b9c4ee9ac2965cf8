"""`SeveralModels`, what a server of several models serves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import Any

from octavo.base.errors import EngineUnavailableError
from octavo.server.app import Entrance, create_server_app
from octavo.server.http.access_control import App
from octavo.server.http.tenants import Tenants
from octavo.server.log_lines import log_event
from octavo.server.registry.context_of_request import ContextOfRequest
from octavo.server.registry.memory_need import GIB
from octavo.server.registry.model_choice import ModelChoice
from octavo.server.registry.model_registry import ModelRegistry
from octavo.server.watch.logs import RequestLog
from octavo.server.watch.metrics import ServerMetrics
from octavo.server.watch.observer_group import ObserverGroup


class SeveralModels:
    """The models of a registry, behind one app: see `octavo.server.server.Served`."""

    def __init__(self, registry: ModelRegistry):
        self.registry = registry

    async def create_app(self, tenants: Tenants) -> App:
        commons = self.registry.commons
        metrics = ServerMetrics("", commons.families)
        context: Any = ContextOfRequest(
            commons.settings, commons.drain_state, commons.created, metrics, self.registry
        )
        entrance = Entrance(
            self.registry,
            ObserverGroup(metrics, RequestLog()),
            metrics,
            lambda app: ModelChoice(app, self.registry),
        )
        return create_server_app(context, tenants, entrance)

    async def start(self, url: str) -> None:
        started = time.monotonic()
        with contextlib.suppress(EngineUnavailableError):  # stopped before it began
            await self.registry.start()
            gc.collect()
            gc.freeze()  # to look at all modules and tokens takes longer than a token
            self._announce(url, time.monotonic() - started)

    def _announce(self, url: str, seconds: float) -> None:
        budget = self.registry.budget_bytes
        models = [status.names[0] for status in self.registry.list()]
        loaded = [model.identity.names[0] for model in self.registry.loaded]
        log_event(
            "ready",
            f"octavo is ready on {url} after {seconds:.1f} s with {len(models)} models, of which "
            f"{', '.join(loaded) or 'none'} {'are' if len(loaded) > 1 else 'is'} loaded; "
            f"{budget / GIB:.2f} GiB are for models",
            {
                "url": url,
                "models": models,
                "loaded": loaded,
                "seconds": round(seconds, 3),
                "model_memory": budget,
            },
        )

    async def after_start(self) -> None:
        """Do nothing: each model has its steps predicted when it has been loaded."""

    @property
    def num_unfinished(self) -> int:
        return self.registry.num_waiting + sum(
            each.engine.num_unfinished for each in self.registry.loaded
        )

    @property
    def num_viewers(self) -> int:
        return sum(each.steps.num_viewers for each in self.registry.loaded)

    @property
    def has_given_up(self) -> bool:
        return False

    async def wait_until_given_up(self) -> None:
        """Never return: a model that cannot be loaded is tried again."""
        await asyncio.Event().wait()

    def end_streams(self) -> None:
        for model in self.registry.loaded:
            model.steps.end()

    async def stop(self) -> None:
        await self.registry.stop()
