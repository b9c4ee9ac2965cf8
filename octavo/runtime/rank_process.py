"""The process of a follower, a rank other than 0 of an engine.

    python -m octavo.runtime.rank_process MODULE CONNECTION PARENT

runs ``serve(membership, settings, home)`` of a module: with its access to the memory that ranks
share, what the home rank gives to `Followers`, and a connection to it for what is said before the
first step. ``CONNECTION`` is an inherited file descriptor, and the memory's descriptors, which are
inherited too, come over it by their numbers. ``PARENT`` is the process that started this one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from octavo.base.errors import OctavoError, PeerEndedError
from octavo.system.child_process import end_with_parent
from octavo.system.machine import without_blas_threads

Message = dict[str, Any]


class Connection(Protocol):
    """A follower's connection to the home rank, for what is said before the first step."""

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the connection has ended, which `receive` tells."""
        ...

    def receive(self) -> Message | None:
        """Wait for the next message; None if the connection has ended."""
        ...


class JsonConnection:
    """One end of a socket pair, over which each end sends objects of JSON, a line for each."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the other end is closed, which `receive` tells."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """Wait for the next message; None if either end is closed."""
        while (end := self._received.find(b"\n")) < 0:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        line = self._received[:end]
        del self._received[: end + 1]
        message: Message = json.loads(line)
        return message

    def has_come(self, seconds: float) -> bool:
        """Wait so long for a message, or for the end; return whether one has come."""
        return b"\n" in self._received or bool(select.select([self], [], [], seconds)[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut_down(self) -> None:
        """End what either end waits for here. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def main(arguments: Sequence[str]) -> int:
    """Run a follower to its end; returns the exit status."""
    module, *numbers = arguments
    connection_fd, parent = map(int, numbers)
    end_with_parent()
    if os.getppid() != parent:  # it ended before
        return 1
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the home rank, which ends this one
    home = JsonConnection(socket.socket(fileno=connection_fd))
    start = home.receive()
    if start is None:
        return 1
    with without_blas_threads():
        from octavo.runtime.rank_memory import Membership  # which imports numpy
    try:
        import_module(module).serve(Membership.attach(start["ticket"]), start["settings"], home)
    except PeerEndedError:
        return 1  # another rank has said why
    except OctavoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
