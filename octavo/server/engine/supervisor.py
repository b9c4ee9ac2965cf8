"""Starts the engine's process, watches it, and starts a new one when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from octavo.base.errors import EngineError, EngineUnavailableError, OctavoError
from octavo.server.engine.generation import EngineFacts, EngineState
from octavo.server.engine.process import Launcher, RunningEngine
from octavo.server.engine.wire import (
    Message,
    MessageDecoder,
    encode_message,
    error_from_message,
    facts_from_dict,
)

_log = logging.getLogger("octavo")

# An engine that dies this often, without a request that may be the cause, is given up.
_MAX_DEATHS_IN_A_ROW = 5
_RESTART_PAUSES = (0.0, 0.0, 1.0, 2.0, 4.0)  # seconds, by the number of such deaths
_LAST_WORDS_SECONDS = 2.0  # for an engine that hangs to say where


class SupervisorListener(Protocol):
    """Callbacks of a supervisor, called on its event loop."""

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        """The engine's state has changed."""
        ...

    def on_engine_message(self, message: Message) -> None:
        """The engine, which is READY, has sent a message."""
        ...

    def on_engine_death(self, at_work: Sequence[str]) -> bool:
        """The engine has died while it computed these requests; return whether one may be the
        cause.

        Not called for the first engine while it loads, nor for one that was asked to stop.
        """
        ...


class Supervisor:
    """Runs engines one after the other. Belongs to one event loop.

    Args:
        engine_timeout: seconds without a message after which an engine is killed; 0 is never.
    """

    def __init__(
        self,
        launcher: Launcher,
        events: SupervisorListener,
        *,
        engine_timeout: float = 300.0,
    ):
        self.state = EngineState.STARTING
        self.facts: EngineFacts | None = None  # until it has been READY
        self.num_restarts = 0
        self.is_stopping = False
        self._launcher = launcher
        self._events = events
        self._engine_timeout = engine_timeout
        self._connection: _Connection | None = None
        self._engine: RunningEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._num_deaths_in_a_row = 0
        self._last_sign_of_life = 0.0

    async def start(self) -> None:
        """Launch an engine, and return when it is ready.

        Raises:
            ModelError, ConfigError, EngineError: what kept it from starting.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(), name="octavo-supervisor")
        await self._started

    async def wait_until_given_up(self) -> None:
        """Return when the engine is down for good without having been asked to stop."""
        assert self._task is not None
        await asyncio.shield(self._task)
        if self.state is not EngineState.FAILED:  # stopped
            await asyncio.Event().wait()

    async def stop(self) -> None:
        """End the engine. May be repeated."""
        self.is_stopping = True
        self._settle_start(EngineUnavailableError("the server is stopping"))
        self.send({"op": "stop"})
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), 1.0)
            if self._engine is not None:
                self._engine.kill()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def send(self, message: Message) -> None:
        """Send a message to the engine, if there is one."""
        if self._connection is not None:
            self._connection.send(message)

    def note_success(self) -> None:
        """Count deaths from 0 again: the engine has finished a request, so its next death is
        another matter."""
        self._num_deaths_in_a_row = 0

    # -- one after the other -----------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            await self._run_all()
        finally:
            self._launcher.close()

    async def _run_all(self) -> None:
        while True:
            end = await self._run_one()
            if self.is_stopping:
                return
            if self._settle_start(end.reason):
                self.state = EngineState.FAILED
                return
            _log.error("%s", end.reason)
            if not self._events.on_engine_death(end.at_work):
                self._num_deaths_in_a_row += 1
            if self._num_deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
                self._set_state(EngineState.FAILED, "it died too often")
                return
            self.num_restarts += 1
            await asyncio.sleep(_RESTART_PAUSES[self._num_deaths_in_a_row])

    def _settle_start(self, error: Exception | None) -> bool:
        """Let `start` return, or raise ``error``, if it still waits; return whether it did."""
        if self._started is None or self._started.done():
            return False
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)
        return True

    async def _run_one(self) -> _End:
        """Launch an engine, and return when it has ended."""
        try:
            engine = self._engine = self._launcher.launch()
        except OSError as error:  # too many files or processes, no memory, no interpreter
            return _End(EngineError(f"the engine's process cannot be started: {error}"))
        connection = self._connection = _Connection(self._receive)
        watchdog = obstacle = None
        try:
            await engine.connect(lambda: connection)
            self._last_sign_of_life = time.monotonic()
            watchdog = asyncio.create_task(self._watch(engine, connection))
            await connection.closed
        except OctavoError as error:
            obstacle = error
        finally:
            if watchdog is not None:
                watchdog.cancel()
            self._connection = self._engine = None
            connection.close()
            was_ready = self.state is EngineState.READY
            if was_ready and not self.is_stopping:
                self._set_state(EngineState.RESTARTING, "the engine died")
            engine.kill()
            status = await asyncio.to_thread(engine.wait)
        if obstacle is not None:
            return _End(obstacle)
        if connection.failure is not None:
            return _End(error_from_message(connection.failure))
        if not was_ready:
            return _End(EngineError(f"the engine ended while it was loading ({status})"))
        at_work = engine.at_work()
        reason = f"the engine died ({status}) at work on {len(at_work)} samples"
        return _End(EngineError(reason), at_work)

    async def _watch(self, engine: RunningEngine, connection: _Connection) -> None:
        """Kill an engine that has sent nothing for too long, so that it leaves a trace of where it
        hangs."""
        number = 0
        while self._engine_timeout:
            await asyncio.sleep(min(1.0, self._engine_timeout / 4))
            if self.state is not EngineState.READY:
                continue
            number += 1
            connection.send({"op": "ping", "number": number, "now": time.monotonic()})
            silence = time.monotonic() - self._last_sign_of_life
            if silence > self._engine_timeout:
                _log.error("the engine has given no sign of life for %.0f s", silence)
                engine.kill(signal.SIGABRT)
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                engine.kill()  # one that is stopped, or hangs in the kernel, hears nothing else
                return

    # -- from the engine ---------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        self._last_sign_of_life = time.monotonic()
        if message["ev"] == "ready":
            if self.is_stopping:  # it had begun to load before, and is not needed any more
                return
            self.facts = facts_from_dict(message["facts"])
            self._set_state(EngineState.READY, "")
            self._settle_start(None)
        else:
            self._events.on_engine_message(message)

    def _set_state(self, state: EngineState, detail: str) -> None:
        if state is not self.state:
            self.state = state
            self._events.on_engine_state(state, detail)


class _End(NamedTuple):
    """The end of one engine: why, and which requests it was computing."""

    reason: OctavoError
    at_work: Sequence[str] = ()


class _Connection(asyncio.Protocol):
    """The server's end of the connection."""

    def __init__(self, receive: Callable[[Message], None]):
        self._receive = receive
        self._decoder = MessageDecoder()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Message | None = None  # the message "failed", if one came

    def send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_message(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if message["ev"] == "failed":
                self.failure = message
                self.close()
            else:
                self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
