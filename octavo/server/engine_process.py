"""How the engine's process is started and ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Protocol

from octavo.config import EngineArgs
from octavo.server.tenants import KEY_VARIABLE

# What is on its way to the server while it is busy must not make the engine wait.
_BUFFER_BYTES = 4 << 20


class RunningEngine(Protocol):
    """An engine that was launched. ``connection`` is our end of its socket pair."""

    connection: socket.socket
    args: dict[str, Any]  # for its first message

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End it at once. No error if it has ended."""
        ...

    def wait(self) -> str:
        """Wait until it has ended, and say how."""
        ...


class Launcher(Protocol):
    """Starts engines, one after another."""

    def launch(self) -> RunningEngine: ...


class ProcessLauncher:
    """Starts a fresh interpreter for each engine: nothing of the server is shared with it.

    Both write their logs, in the same format, to the same stderr.
    """

    def __init__(self, args: EngineArgs, log_format: str = "text"):
        self._args = dataclasses.asdict(args)
        self._log_format = log_format

    def launch(self) -> EngineProcess:
        return EngineProcess(self._args, self._log_format)


class EngineProcess:
    """One engine process."""

    def __init__(self, args: dict[str, Any], log_format: str):
        self.args = args
        self.connection, theirs = socket.socketpair()
        for end in (self.connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.connection.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "octavo.server.worker", str(theirs.fileno()), log_format],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def wait(self) -> str:
        status = self.process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"
