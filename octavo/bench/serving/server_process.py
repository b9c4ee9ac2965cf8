"""Runs a server of our own for the time of a measurement, and ends it in any case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from octavo.bench.child_processes import need_process_groups
from octavo.bench.serving.endpoint import ServerError

_READY = re.compile(r"is ready on (https?://\S+)\s")
_MAX_LOG_BYTES = 1 << 20
_POLL_SECONDS = 0.02
_STOP_SECONDS = 10.0


@contextmanager
def running_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start ``octavo serve MODEL`` on a free port of this machine, and return its URL.

    It is in a process group of its own: Ctrl-C ends the measurement, which then ends the server.

    Raises:
        ServerError: it did not start; tells its last line of output.
    """
    need_process_groups("a server of the benchmark's own")
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0"]
    command += ["--drain-timeout", "0", "--log-format", "text", *flags]
    with _termination_interrupts(), tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _wait_until_ready(server, log)
        finally:
            _stop(server)


def _wait_until_ready(server: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    while True:
        is_over = server.poll() is not None
        said = os.pread(log.fileno(), _MAX_LOG_BYTES, 0).decode(errors="replace")
        if found := _READY.search(said):
            return found[1]
        if is_over:
            lines = [line for line in said.splitlines() if line.strip()] or ["without a word"]
            reason = lines[-1].removeprefix("octavo: error: ")
            raise ServerError(f"octavo serve ended before it was ready: {reason}")
        time.sleep(_POLL_SECONDS)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):  # and its engine, if that is still there
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, which cleans up, where signals are ours to handle."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):  # as in a shell's background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
