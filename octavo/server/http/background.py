"""Threads for work that would hold up the event loop.

That is, among other things, all that tokenizers, chat templates and detokenizers do, however little
it is for one request. Short calls have a thread of their own, so that they do not wait behind long
ones. There are only a few threads: each one more that runs Python makes the event loop wait longer
for the interpreter. A thread cannot be stopped, so one whose call does not return is abandoned, and
another takes its place; otherwise two such calls would block all work here.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from octavo.base.errors import DeadlineError, QueueFullError

NUM_THREADS = 2
MAX_SECONDS = 60.0  # far more than any call takes that is bounded as it should be
MAX_LOST = 4  # abandoned threads, beyond which no call is begun until one of them returns

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("octavo.server")


async def in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that may take long in a thread, and return its result.

    It is not interrupted if the caller is cancelled. The call should not spend more than some
    milliseconds in one C function that keeps the interpreter's lock.

    Raises:
        DeadlineError: it takes longer than anything should.
        QueueFullError: too many calls have done so, and may still.
    """
    return await _long().run(functools.partial(function, *args, **kwargs))


async def briefly_in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that takes a few milliseconds at most, otherwise like `in_background`."""
    return await _short().run(functools.partial(function, *args, **kwargs))


def post_in_background(function: Callable[[], None]) -> None:
    """Run a short call whose result is not needed. An exception of it is logged."""

    def call() -> None:
        try:
            function()
        except Exception:
            _log.exception("a call in the background failed")

    _short().post(call)


@functools.cache
def _long() -> Background:
    return Background()


@functools.cache
def _short() -> Background:
    return Background(num_threads=1)


class Background:
    """Worker threads, which the callers that wait for them watch meanwhile."""

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        max_seconds: float = MAX_SECONDS,
        max_lost: int = MAX_LOST,
    ):
        self._num_threads = num_threads
        self._max_seconds = max_seconds
        self._max_lost = max_lost
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._workers: set[_Worker] = set()
        self._lost: set[_Worker] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a call and return its result, as `in_background` does."""
        self._replace_stuck_workers()
        if self._has_lost_too_many:
            raise _too_many()
        call = _Call(function)
        self._calls.put(call)
        waiting: asyncio.Future[T] = asyncio.wrap_future(call.result)
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=min(self._max_seconds / 4, 1.0))
                self._replace_stuck_workers()
            return waiting.result()
        finally:
            waiting.cancel()  # if it has not begun, it never will

    def post(self, function: Callable[[], None]) -> None:
        """Run a call whose result is not needed."""
        self._replace_stuck_workers()
        if not self._has_lost_too_many:
            self._calls.put(_Call(function))

    @property
    def _has_lost_too_many(self) -> bool:
        return len(self._lost) >= self._max_lost

    def _replace_stuck_workers(self) -> None:
        """Abandon workers whose call takes too long, and start as many as are missing."""
        latest = time.monotonic() - self._max_seconds
        with self._lock:
            for worker in [one for one in self._workers if one.began_before(latest)]:
                self._workers.remove(worker)
                self._lost.add(worker)
                worker.give_up(self._max_seconds)
            if self._has_lost_too_many:
                self._refuse_all()
            while len(self._workers) < self._num_threads:
                worker = _Worker(self._calls, self._end_call)
                self._workers.add(worker)
                worker.start()

    def _refuse_all(self) -> None:
        """Fail all waiting calls, each of which may be like those that got stuck."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(_too_many())

    def _end_call(self, worker: _Worker) -> bool:
        """Note that a worker has ended its call; return False if it was abandoned before."""
        with self._lock:
            self._lost.discard(worker)
            worker.call = None
            return worker in self._workers


class _Call:
    def __init__(self, function: Callable[[], Any]):
        # As asyncio.to_thread does: the caller's context variables hold in the thread, too.
        self.function = functools.partial(contextvars.copy_context().run, function)
        self.result: Future[Any] = Future()
        self.begin_time = 0.0


class _Worker(threading.Thread):
    """Runs one call after the other, until it is abandoned."""

    def __init__(self, calls: queue.SimpleQueue[_Call], end_call: Callable[[_Worker], bool]):
        super().__init__(name="octavo-background", daemon=True)  # the end does not wait for it
        self.call: _Call | None = None
        self._calls = calls
        self._end_call = end_call

    def run(self) -> None:
        is_in_use = True
        while is_in_use:
            call = self._calls.get()
            if not call.result.set_running_or_notify_cancel():
                continue
            call.begin_time = time.monotonic()
            self.call = call
            result, error = _outcome(call.function)
            is_in_use = self._end_call(self)
            if not is_in_use:
                _log.warning("a call that was given up has returned")
            elif error is not None:
                call.result.set_exception(error)
            else:
                call.result.set_result(result)
            del call, result, error  # they may be large, and the next call may be far away

    def began_before(self, latest: float) -> bool:
        call = self.call
        return call is not None and call.begin_time < latest

    def give_up(self, seconds: float) -> None:
        assert self.call is not None
        _log.error("a call does not return; its thread is abandoned")
        message = f"to prepare this request takes more than {seconds:g} s: shorten its texts"
        self.call.result.set_exception(DeadlineError(message))


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error
    except BaseException as error:  # a panic in a library's native code is none of `Exception`
        broken = RuntimeError(f"{type(error).__name__}: {error}")
        broken.__cause__ = error
        return None, broken


def _too_many() -> QueueFullError:
    return QueueFullError("long requests are not taken: too many others do not come to an end", 5.0)
