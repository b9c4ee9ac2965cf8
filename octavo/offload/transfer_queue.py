"""The queue of a thread that moves KV blocks, for the engine's thread that waits for no storage."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from octavo.core.host_kv_cache import FinishedTransfer


class _Task(Protocol):
    @property
    def kind(self) -> str: ...  # "read", or one of those that are done in the order of writes
    @property
    def place(self) -> int: ...  # of the block in host memory; negative: nothing is told of its end


TaskT = TypeVar("TaskT", bound=_Task)


class TransferQueue(Generic[TaskT]):
    """The tasks of a thread, and their results. Reads come before writes. The thread, which runs
    ``run``, holds no reference but to this; a subclass does each task (``_do``)."""

    def __init__(self) -> None:
        self._news = threading.Condition()  # guards all that follows
        self._reads: deque[TaskT] = deque()
        self._writes: deque[TaskT] = deque()
        self._finished: deque[FinishedTransfer] = deque()
        self._busy_since: float | None = None
        self._is_stopping = False

    # -- from the engine's thread ----------------------------------------------------------------

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    def add(self, task: TaskT) -> None:
        with self._news:
            (self._reads if task.kind == "read" else self._writes).append(task)
            self._news.notify_all()

    def finished_transfers(self) -> Sequence[FinishedTransfer]:
        if not self._finished:  # as nearly always, without the lock
            return ()
        with self._news:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def wait(self, seconds: float) -> bool:
        with self._news:
            if not self._is_at_work():
                return bool(self._finished)
            self._news.wait_for(lambda: self._finished or not self._is_at_work(), seconds)
            return True

    def stop(self, seconds: float) -> None:
        """Let the thread end when it has made the writes that wait, or after ``seconds``."""
        with self._news:
            self._reads.clear()
            self._news.wait_for(lambda: not self._is_at_work(), seconds)
            self._writes.clear()
            self._is_stopping = True
            self._news.notify_all()

    def _is_at_work(self) -> bool:
        return bool(self._reads or self._writes or self._busy_since is not None)

    # -- in the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        while (task := self._next_task()) is not None:
            is_good = self._do(task)
            with self._news:
                self._busy_since = None
                if task.place >= 0:
                    self._finished.append(
                        FinishedTransfer(task.place, task.kind == "read", is_good)
                    )
                self._news.notify_all()
        self._release()

    def _next_task(self) -> TaskT | None:
        """Wait for the next task; None: there will be no more."""
        with self._news:
            self._news.wait_for(lambda: self._reads or self._writes or self._is_stopping)
            if not self._reads and not self._writes:
                return None
            self._busy_since = time.monotonic()
            return (self._reads or self._writes).popleft()

    def _do(self, task: TaskT) -> bool:
        """Do a task; return whether the block is where it was to be."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close what blocks are read from and written to."""
        raise NotImplementedError
