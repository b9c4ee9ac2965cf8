"""System features for the processes that benchmarks start: groups, and an orderly end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.system import machine


def need_process_groups(what: str) -> None:
    """Raise BenchmarkError where processes cannot be stopped as a group, or their resource use is
    not told."""
    if not machine.has_process_groups():
        raise BenchmarkError(
            f"{what} cannot run on this system, which has no groups of processes (os.killpg, "
            "os.wait4): run it on Linux or macOS, or in WSL 2"
        )


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is within as an error does: files that are half written go, and
    child processes end."""

    def end(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    numbers = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
    is_main = threading.current_thread() is threading.main_thread()  # who alone may set handlers
    ours = [n for n in numbers if is_main and signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
