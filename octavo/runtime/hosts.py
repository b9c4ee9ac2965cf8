"""Machines on which the ranks of an engine are started, as the home rank sees them.

A placement (a command such as ``ssh``, a scheduler of a cluster) makes a `Host`; `CommandHost` is
the plain one. A process gets its secret by standard input: command lines are read by all users of a
machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.system.child_process import environment_without_keys

_LAST_LINES = 20  # of what a process wrote to its standard error
_LINE_BYTES = 1 << 16


class RemoteProcess(Protocol):
    """A process that was started on a host."""

    def when_it_ends(self, callback: Callable[[str], object]) -> None:
        """Have ``callback`` called in any thread, with how the process has ended, in words."""
        ...

    def kill(self) -> None:
        """End the process, or what connects it to this machine. May be repeated."""
        ...


class Host(Protocol):
    """A machine where octavo is installed. ``name``: for errors."""

    name: str

    def start(self, arguments: Sequence[str], secret: str) -> RemoteProcess:
        """Start ``python`` of that machine with arguments; it is given ``secret``, a line, by
        standard input.

        The process ends with the thread that is its parent there (`end_with_parent`), so that it
        does not stay where it cannot see the end of its link, as one that was stopped.

        Raises:
            ConfigError: it cannot be started.
        """
        ...


class CommandHost:
    """A host that a command reaches: ``ssh node-2 /opt/octavo/bin/python``. What the process writes
    to standard error appears here.

    ``command`` is split as a shell would, and no shell runs it.

    Raises:
        ConfigError: it is no command.
    """

    def __init__(self, command: str):
        self.name = command
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"{command!r} is no command: {error}") from None
        if not self._command:
            raise ConfigError("an empty text is no command")

    def start(self, arguments: Sequence[str], secret: str) -> CommandProcess:
        return CommandProcess([*self._command, *arguments], secret)


class CommandProcess:
    """The process of a command, with the thread that has started it, watches it, and is its
    parent.

    Raises:
        ConfigError: the command cannot be run.
    """

    def __init__(self, command: Sequence[str], secret: str):
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._end: Future[str] = Future()
        threading.Thread(
            target=self._run, args=(command, secret), name="octavo-remote-process", daemon=True
        ).start()
        try:
            self._process = self._started.result()
        except OSError as error:
            raise ConfigError(f"{shlex.join(command)} cannot be run: {error}") from error

    def when_it_ends(self, callback: Callable[[str], object]) -> None:
        self._end.add_done_callback(lambda end: callback(end.result()))

    def kill(self) -> None:
        self._process.kill()

    def _run(self, command: Sequence[str], secret: str) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment_without_keys(),
                start_new_session=True,  # Ctrl-C is for the home rank, which ends this one
            )
        except OSError as error:
            self._started.set_exception(error)
            return
        self._started.set_result(process)
        self._watch(process, secret)

    def _watch(self, process: subprocess.Popen[bytes], secret: str) -> None:
        assert process.stdin is not None and process.stderr is not None
        with contextlib.suppress(OSError), process.stdin as file:
            file.write(secret.encode() + b"\n")
        lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        with process.stderr as errors:
            while line := errors.readline(_LINE_BYTES):
                lines.append(line)
                with contextlib.suppress(OSError):
                    os.write(2, line)
        status = process.wait()
        how = f"ended with signal {-status}" if status < 0 else f"ended with exit status {status}"
        words = b"".join(lines).decode(errors="replace").rstrip("\n")
        self._end.set_result(how + (f"; its last words:\n{words}" if words else ", without a word"))
