"""Compiles Triton kernels in parallel, before the first of them is launched.

Triton compiles a kernel when it is first launched, one after the other: dozens, for a model that
has never run on a machine, each of which takes a second or more of one core. Here the kernels that
a step would launch are first collected, without launching any, and compiled by several threads.
Triton keeps the results on disk (``TRITON_CACHE_DIR``, by default ``~/.triton/cache``), so that the
next start finds them there.

It uses interfaces of Triton: a hook that is called before a kernel is compiled and may prevent its
launch, ``JITFunction.preload``, which compiles what the hook recorded, and ``AsyncCompileMode``, by
which an executor does it. ``preload`` takes a string that is the name of one of Triton's types for
that type: with "int8" as a constant, it compiles another kernel under the same key. Such kernels
are left to their launch.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import triton.language as tl
from triton import AsyncCompileMode, knobs

_log = logging.getLogger("octavo")

_TELL_EVERY = 5.0  # seconds


def compile_ahead(launch: Callable[[], None], threads: int) -> int:
    """Compile the kernels that ``launch`` would launch and that are not compiled in this process
    yet.

    Kernels that fail to compile are left to their launch, which reports why. Progress is logged.

    Args:
        launch: launches kernels, and looks at none of their results.
        threads: threads that compile.

    Returns:
        Number of kernels that had to be compiled.
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
    ) as error:  # an error of Triton: a launch compiles the kernel, or reports what is wrong
        _log.warning("kernels are compiled one after the other: %s", error)
        return len(wanted)
    _log.info("%d kernels are compiled after %.1f s", len(wanted), time.perf_counter() - begin)
    return len(wanted)


def _collect(launch: Callable[[], None]) -> dict[str, tuple[Any, str]]:
    """The kernels that ``launch`` would compile, each with the argument of Triton's ``preload``."""
    wanted: dict[str, tuple[Any, str]] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        specialization: str = compile["specialization_data"]
        constants = json.loads(specialization)["constant_vals"]
        if not any(isinstance(each, str) and tl.dtype.is_dtype(each) for each in constants):
            wanted[specialization] = fn.jit_function, specialization
        return True  # neither compile nor launch it

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    return wanted


class _CountingPool(ThreadPoolExecutor):
    """Threads that log their progress every few seconds."""

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
