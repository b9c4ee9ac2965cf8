"""`OctavoServer`, one server from its start to its end.

start     what it serves ─► ready
SIGTERM   drain: new requests are refused, running ones may finish within --drain-timeout
again     stop: streams get one error event
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import uvicorn

from octavo.server.http.access_control import App, DrainState
from octavo.server.http.connection import uvicorn_config
from octavo.server.http.tenants import Tenants
from octavo.server.running_servers import noted
from octavo.server.settings import STOP_SIGNALS, ServerSettings

_log = logging.getLogger("octavo.server")

# After the engine has stopped, streams have this long to tell their clients.
_LAST_WORDS_SECONDS = 1.0


class Served(Protocol):
    """The models that a server serves: one, or several."""

    async def create_app(self, tenants: Tenants) -> App:
        """Return the app that answers HTTP; engines may still be loading.

        Raises:
            ConfigError, ModelError: the server cannot start.
        """
        ...

    async def start(self, url: str) -> None:
        """Return when all that is loaded at the start is ready, and say so in the log. HTTP is
        answered meanwhile.

        Raises:
            ConfigError, ModelError, EngineError: the server cannot start.
        """
        ...

    async def after_start(self) -> None:
        """Do what the start need not wait for."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of generations that are not over, waiting ones too."""
        ...

    @property
    def num_viewers(self) -> int:
        """Number of open streams of steps."""
        ...

    @property
    def has_given_up(self) -> bool:
        """Whether nothing can be served any more."""
        ...

    async def wait_until_given_up(self) -> None: ...

    def end_streams(self) -> None:
        """End the streams of steps."""
        ...

    async def stop(self) -> None:
        """End all generations and all engines. May be repeated."""
        ...


class OctavoServer:
    """One server: what it serves, and the HTTP side. ``run`` is called once."""

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        drain_state: DrainState,
        served: Served,
    ):
        self.settings = settings
        self.served = served
        self._drain_state = drain_state
        self._listener = listener
        self._tenants = Tenants(settings)
        self._hurry = asyncio.Event()  # set by the second signal
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> int:
        """Serve until the end; return the exit status.

        Raises:
            ConfigError, ModelError, EngineError: the engine could not start.
        """
        with self._signals():
            try:
                app = await self.served.create_app(self._tenants)
                async with self._answering(app) as serving:
                    await self.served.start(self._url)
                    if self._is_open_to_all and not self._drain_state.is_draining:
                        _log.warning("%s", without_a_key(self._url))
                    with noted(self._url):
                        await self.served.after_start()
                        await self._wait_for_the_end(serving)
                    return 1 if self.served.has_given_up else 0
            finally:
                await self.served.stop()

    @contextlib.asynccontextmanager
    async def _answering(self, app: App) -> AsyncIterator[asyncio.Task[None]]:
        """Answer HTTP within the block; the yielded task ends when that does.

        At the end of the block engines are stopped first, and then the connections, so that open
        streams get their error event.
        """
        server = _Uvicorn(uvicorn_config(app, self.settings))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            yield serving
        finally:
            await self.served.stop()
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)

    async def _wait_for_the_end(self, serving: asyncio.Task[None]) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        given_up = asyncio.create_task(self.served.wait_until_given_up())
        await asyncio.wait({serving, stopped, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if given_up.done():  # waiting requests would wait for ever
            self._hurry.set()
            self._begin_stop()
            await stopped
        given_up.cancel()
        stopped.cancel()

    @property
    def _is_open_to_all(self) -> bool:
        return self._tenants.is_open and not self.settings.is_loopback

    @property
    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}"

    # -- the end -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, self._on_signal)
        try:
            yield
        finally:
            for signum in STOP_SIGNALS:
                loop.remove_signal_handler(signum)

    def _on_signal(self) -> None:
        if self._stopping is not None:
            self._hurry.set()
        self._begin_stop()

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._drain_state.is_draining = True
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """Let running requests finish, as long as there is time, and then end."""
        _log.info("stopping: %d requests may finish", self.served.num_unfinished)
        deadline = time.monotonic() + self.settings.drain_timeout
        while self._tenants.num_running and time.monotonic() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), 0.02)
                break
        await self.served.stop()
        self.served.end_streams()
        last = time.monotonic() + _LAST_WORDS_SECONDS
        while self._has_listeners and time.monotonic() < last:
            await asyncio.sleep(0.01)
        self._stopped.set()

    @property
    def _has_listeners(self) -> bool:
        return bool(self._tenants.num_running or self.served.num_viewers)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that leaves signals to `OctavoServer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def without_a_key(url: str) -> str:
    """Return the warning about a server that a network can reach and that asks for no key."""
    return (
        f"NO API KEY: all who can reach {url} may use it. Give --api-key-file to ask for a key, or "
        "--host 127.0.0.1 to keep it to this machine. Clients may name the server by its address, "
        f"{socket.gethostname()} or localhost; --allowed-host allows another name"
    )
