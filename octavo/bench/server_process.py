"""A server of our own, started to be measured, and ended whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from octavo.bench.endpoint import ServerError

_READY = re.compile(r"is ready on (https?://\S+)")
_KEPT_LINES = 20
_STOP_SECONDS = 10.0


@contextmanager
def running_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of ``octavo serve MODEL`` on a free port of this machine.

    It is in a process group of its own: Ctrl-C ends the measurement, which then ends the server.

    Raises:
        ServerError: it did not start; with the last thing it said.
    """
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0"]
    command += ["--drain-timeout", "0", "--log-format", "text", *flags]
    with _termination_unwinds():
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            yield _wait_until_ready(server)
        finally:
            _stop(server)


def _wait_until_ready(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in server.stderr:
        if found := _READY.search(line):
            # Its pipe must be emptied, or it will wait for us.
            threading.Thread(target=_drain, args=(server,), daemon=True).start()
            return found[1]
        said.append(line.strip())
    last = next((line for line in reversed(said) if line), "without a word")
    raise ServerError(f"octavo serve ended before it was ready: {last}")


def _drain(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    with suppress(ValueError, OSError):  # it was closed under us
        for _ in server.stderr:
            pass


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):  # with its engine, if that is still there
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """SIGTERM runs what is left to do, as Ctrl-C does, where signals are ours to handle."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
