"""Start and end the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.server.engine.in_flight_record import InFlightRecord
from octavo.server.engine.wire import Message, encode_message
from octavo.settings.engine import EngineArgs
from octavo.system.child_process import environment_without_keys
from octavo.system.machine import KILL

if TYPE_CHECKING:
    from octavo.offload.open_peers import TransferFiles

# The module that the engine's process runs.
WORKER = "octavo.server.engine.worker"

# What is on its way to the server while it is busy must not make the engine wait.
_BUFFER_BYTES = 4 << 20


class RunningEngine(Protocol):
    """An engine's process, wherever it runs."""

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Have a protocol served by the connection to it; returns once there is one.

        Raises:
            OctavoError: it did not start, or cannot be reached.
        """
        ...

    def kill(self, signum: int = KILL) -> None:
        """End it at once. No error if it has ended already."""
        ...

    def wait(self) -> str:
        """Wait until it has ended, and return how, in words."""
        ...

    def at_work(self) -> list[str]:
        """Return the names of the samples that it was computing when it ended."""
        ...


class Launcher(Protocol):
    """Starts engines, one after another."""

    def launch(self) -> RunningEngine:
        """Begin to start an engine. OSError if the system refuses."""
        ...

    def close(self) -> None:
        """Give back what it holds for the next engine: there will be none. May be repeated."""
        ...


class ProcessLauncher:
    """Starts engines, one after another, each in a fresh interpreter: it shares nothing with the
    server.

    Both write their logs, in the same format, to the same stderr.

    Args:
        cpus: the processors that an engine is pinned to; empty: it is not pinned.
        transfer: where the engine passes KV on and gets it from; None where prompts are not
            computed apart. It stays open.
        when_closed: called by ``close``: there will be no further engine.
    """

    def __init__(
        self,
        args: EngineArgs,
        log_format: str = "text",
        cpus: Sequence[int] = (),
        transfer: TransferFiles | None = None,
        *,
        when_closed: Callable[[], None] = lambda: None,
    ):
        self._cpus = cpus
        self._transfer = transfer
        self._when_closed = when_closed
        self._args = {**dataclasses.asdict(args), "given": sorted(args.given_settings())}
        self._log_format = log_format
        self._ahead: EngineProcess | None = None

    def launch_ahead(self) -> None:
        """Start the engine that the next ``launch`` returns: it loads while the server is being
        imported.

        If the system refuses, ``launch`` will say so.
        """
        with contextlib.suppress(OSError):
            self._ahead = self.launch()

    def launch(self) -> EngineProcess:
        """Start an engine. Raises OSError if the system refuses."""
        if (engine := self._ahead) is not None:
            self._ahead = None
            return engine
        return EngineProcess(self._args, self._log_format, self._cpus, self._transfer)

    def close(self) -> None:
        """End the engine that was started ahead, if ``launch`` was not called for it. May be
        repeated."""
        if self._ahead is not None:
            engine = self.launch()
            engine.kill()
            engine.connection.close()
            engine.wait()
        self._when_closed()


class EngineProcess:
    """One engine process, which has got its settings.

    ``connection`` is the server's end of its socket pair, which does not block.
    """

    def __init__(
        self,
        args: dict[str, Any],
        log_format: str,
        cpus: Sequence[int] = (),
        transfer: TransferFiles | None = None,
    ):
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self.connection, their_end = socket.socketpair()
            ours.enter_context(self.connection)
            theirs.enter_context(their_end)
            for end in (self.connection, their_end):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            start: Message = {"op": "start", "args": args, "cpus": [*cpus]}
            if transfer is not None:
                start["transfer"] = {"own": transfer.own, "peers": [*transfer.peers.items()]}
            self.connection.sendall(encode_message(start))
            self.connection.setblocking(False)
            self._record, record_fd = InFlightRecord.create()
            theirs.callback(os.close, record_fd)
            further = () if transfer is None else transfer.descriptors
            self.process = _start_worker(their_end.fileno(), record_fd, log_format, further)
            ours.pop_all()  # it runs: our end stays open

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Have a protocol of this event loop served by the connection."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(protocol, sock=self.connection)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, signum: int = KILL) -> None:
        """End it at once. No error if it has ended already."""
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def wait(self) -> str:
        """Wait until it has ended, and return how: its signal or exit status."""
        status = self.process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def at_work(self) -> list[str]:
        """Return the names of the samples that it was computing when it ended."""
        return self._record.read()


def _start_worker(
    connection_fd: int, record_fd: int, log_format: str, further_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    fds = [connection_fd, record_fd]
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, *map(str, fds), log_format],
        pass_fds=[*fds, *further_fds],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment_without_keys(),
    )
