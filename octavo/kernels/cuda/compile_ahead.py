"""Compiles the kernels of a GPU side by side, before the first of them is launched.

Triton compiles a kernel when it is first launched, one after the other: dozens, for a model that
has never run on a machine, each of which takes a second or more of one core. Here what would be
launched is collected first, without launching any of it, and compiled by several threads. Triton
keeps the results on its disk (``TRITON_CACHE_DIR``, by default ``~/.triton/cache``), so that the
next start finds them there.

By interfaces of Triton's own: a hook that is asked before a kernel is compiled and may keep it from
being launched, ``JITFunction.preload``, which compiles what the hook was told, and
``AsyncCompileMode``, by which an executor does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from triton import AsyncCompileMode, knobs

_log = logging.getLogger("octavo")

_TELL_EVERY = 5.0  # seconds


def compile_ahead(launch: Callable[[], None], threads: int) -> int:
    """Compile what ``launch`` would launch and has not been compiled in this process.

    Kernels that do not compile are left to be launched, which says why. Progress is logged.

    Args:
        launch: launches kernels, and looks at nothing that they compute.
        threads: that compile.

    Returns:
        How many kernels there were to compile.
    """
    wanted = _collect(launch)
    if not wanted:
        return 0
    begin = time.perf_counter()
    _log.info("compiling %d kernels: once on this machine, Triton keeps them", len(wanted))
    try:
        with (
            _CountingPool(threads, len(wanted)) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
        ):
            for kernel, specialization in wanted.values():
                kernel.preload(specialization)
    except (
        Exception
    ) as error:  # of Triton's own: a launch compiles without it, or says what is wrong
        _log.warning("kernels are compiled one after the other: %s", error)
        return len(wanted)
    _log.info("%d kernels are compiled after %.1f s", len(wanted), time.perf_counter() - begin)
    return len(wanted)


def _collect(launch: Callable[[], None]) -> dict[str, tuple[Any, str]]:
    """The kernels that ``launch`` would compile, each with what Triton's ``preload`` takes."""
    wanted: dict[str, tuple[Any, str]] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        specialization: str = compile["specialization_data"]
        wanted[specialization] = fn.jit_function, specialization
        return True  # it is neither compiled nor launched

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    return wanted


class _CountingPool(ThreadPoolExecutor):
    """Threads that log, every few seconds, how much of their work is done."""

    def __init__(self, threads: int, total: int):
        super().__init__(threads, thread_name_prefix="octavo-compile")
        self._total, self._done = total, 0
        self._told_at = time.perf_counter()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: Future[Any]) -> None:
        with self._lock:
            self._done += 1
            done, now = self._done, time.perf_counter()
            if now - self._told_at < _TELL_EVERY:
                return
            self._told_at = now
        _log.info("compiling kernels: %d of %d", done, self._total)
