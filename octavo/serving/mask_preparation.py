"""`MaskPreparation`, threads that make the masks of requests while an engine runs."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from octavo.base.errors import ENDINGS

T = TypeVar("T")

_NUM_THREADS = 2
_NICENESS = 2  # the engine's threads go first


class MaskPreparation:
    """A few threads, started when they are first needed, that prepare masks in order of asking.

    They end with the process, whatever they are doing.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_threads = 0

    def submit(
        self,
        prepare: Callable[[], T],
        done: Callable[[T | BaseException], None] = lambda result: None,
    ) -> None:
        """Have something made; ``done`` is called in the thread that has, with it or its error."""
        if self._num_threads < _NUM_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put(partial(_carry_out, prepare, done))

    def _work(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            self._jobs.get()()


def _carry_out(prepare: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
    try:
        result: T | BaseException = prepare()
    except ENDINGS:
        raise
    except BaseException as error:
        result = error
    done(result)
