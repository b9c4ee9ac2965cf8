"""`MaskPreparation`, threads that make the masks of requests while an engine runs."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from octavo.base.errors import ENDINGS, QueueFullError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import GrammarCompiler
from octavo.serving.text_engine import PreparedMask

_log = logging.getLogger("octavo")

_NICENESS = 2  # the engine's threads go first
_QUICK_SECONDS = 0.05  # of a processor, to compile a grammar
_MAX_SLOW = 16  # grammars that may wait in the slow lane
_RETRY_SECONDS = 2.0

Done: TypeAlias = Callable[[PreparedMask | BaseException], None]


class _Lane:
    """A thread, started when it is first needed, that does work in the order of asking. It ends
    with the process, whatever it is doing."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return self._work.qsize()

    def put(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            work = self._work.get()
            try:
                work()
            except ENDINGS:
                raise
            except BaseException:  # others wait for this thread
                _log.exception("what a mask needs could not be made")
            del work  # requests end


class MaskPreparation:
    """Makes the masks of requests, each as soon as what it needs allows:

    - those of constraints that are compiled already do not wait;
    - others are tried first, which happens in another process, and in its order;
    - what was tried is compiled in one of two lanes, so that what is quickly compiled does not wait
      for what is not.
    """

    def __init__(self, grammars: GrammarCompiler):
        self._grammars = grammars
        self._first, self._quick, self._slow = _Lane(), _Lane(), _Lane()

    def submit(
        self, params: SamplingParams, tenant: str, prepare: Callable[[], PreparedMask], done: Done
    ) -> None:
        """Have a mask made by ``prepare``; ``done`` is called in the thread that has made it, with
        it or its error.

        Args:
            tenant: who asks. Tenants take turns.
        """
        work = _Work(prepare, done)
        self._first.put(lambda: self._begin(params.structured_outputs, tenant, work))

    def _begin(self, values: Any, tenant: str, work: _Work) -> None:
        if values is None:
            work()
            return
        try:
            asked = StructuredOutputs.of(values)
            is_compiled = self._grammars.is_compiled(asked)
            trial = None if is_compiled else self._grammars.try_out(asked, tenant)
        except ENDINGS:
            raise
        except BaseException as error:
            work.done(error)
            return
        if is_compiled:
            work()
        elif trial is None:
            self._compile(asked, work)
        else:
            trial.add_done_callback(lambda trial: self._go_on(trial, asked, work))

    def _go_on(self, trial: Future[Any], asked: StructuredOutputs, work: _Work) -> None:
        if (error := trial.exception()) is not None:
            work.done(error)
        else:
            self._compile(asked, work)

    def _compile(self, asked: StructuredOutputs, work: _Work) -> None:
        if self._grammars.seconds_to_compile(asked) <= _QUICK_SECONDS:
            self._quick.put(work)
        elif len(self._slow) < _MAX_SLOW:
            self._slow.put(work)
        else:
            message = "too many constraints wait for being compiled already"
            work.done(QueueFullError(message, _RETRY_SECONDS))


class _Work:
    """The work of making one mask."""

    def __init__(self, prepare: Callable[[], PreparedMask], done: Done):
        self._prepare = prepare
        self.done = done

    def __call__(self) -> None:
        try:
            result: PreparedMask | BaseException = self._prepare()
        except ENDINGS:
            raise
        except BaseException as error:
            result = error
        self.done(result)
