"""One engine for many threads, stepped by one of those that wait, for all of them.

    thread A   wait_for(its answers)   ── leads: commands, step, deliver, commands, step ...
    thread B   do(add a prompt)        ── carried out by A between two steps; then B waits, too
    thread C   wait_for(its stream)    ── woken by A when a step has brought something for it

So requests of all threads are in one batch. When A has what it waited for, another waiting thread
leads. While no thread waits, nothing runs; a thread that is alone steps the engine itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.base.errors import ENDINGS, EngineError
from octavo.serving.loop import EngineLoop

T = TypeVar("T")


class EngineClosedError(EngineError):
    """The engine was closed, by some thread."""


class Wait:
    """A wait of one thread, until ``is_done``, which only this thread calls.

    The thread that makes it true calls ``ring``. ``each_step``: any step may make it true.
    """

    def __init__(self, is_done: Callable[[], bool], *, each_step: bool = False):
        self.is_done = is_done
        self.each_step = each_step
        # One bit: held until `ring` is called. A lock, since it may be released from anywhere, also
        # where a garbage collection has interrupted another `ring`.
        self._bell = threading.Lock()
        self._bell.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def clear(self) -> None:
        self._bell.acquire(blocking=False)

    def sleep(self) -> None:
        """Sleep until ``ring`` is called."""
        self._bell.acquire()


class SharedEngineLoop:
    """An `EngineLoop` that any number of threads run, one at a time.

    Only the thread that runs it at that moment, the leader, touches the engine. An exception there
    (an interruption, a bug of the engine) is raised in that thread, and another one goes on.
    """

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        # Guards the fields below, and is never held while something is computed. It may be taken
        # again by the thread that has it: a garbage collection can close a stream at any moment.
        self._mutex = threading.RLock()
        self._leader: Wait | None = None
        self._leading_thread = 0
        self._waiting: dict[Wait, None] = {}  # in the order in which they came
        self._is_closed = False
        self._num_steps = 0

    # -- from any thread ----------------------------------------------------------------------

    def wait_for(self, wait: Wait) -> None:
        """Return when ``wait.is_done()``. Until then this thread leads, or another one does.

        Raises:
            EngineClosedError: the engine was closed.
        """
        try:
            while not self._is_over(wait):
                if self._leads(wait):
                    self._step()
                else:
                    wait.sleep()
        finally:
            self._leave(wait)

    def do(self, command: Callable[[], T]) -> T:
        """Carry out a command that touches the engine, between two steps; returns its result."""
        awaited = _AwaitedCommand(command)
        wait = awaited.wait
        try:
            while not self._is_over(wait):
                if self._leads(wait, awaited):
                    awaited.run()
                else:
                    wait.sleep()
        finally:
            self._leave(wait)
        result: T = awaited.result()
        return result

    def ask(self, command: Callable[[], object]) -> None:
        """Have a command carried out without waiting for it: now, or after the step that is
        under way."""
        wait = Wait(lambda: True)
        try:
            with self._mutex:
                if self._leader is not None:
                    self._loop.tell(command)
                    return
                self._lead(wait)
            self._loop.carry_out(command)
        finally:
            self._leave(wait)

    def wait_for_step(self) -> None:
        """Return after a step, of this thread or another."""
        before = self._num_steps
        self.wait_for(Wait(lambda: self._num_steps != before, each_step=True))

    def close(self) -> None:
        """Abort everything and release the engine; waiting threads get an error. May be
        repeated."""
        with contextlib.suppress(EngineClosedError):
            self.do(self._close)

    # -- the leader ---------------------------------------------------------------------------

    def _is_over(self, wait: Wait) -> bool:
        """Return whether the wait has ended. Any ``ring`` from here on is noticed."""
        wait.clear()
        if wait.is_done():
            return True
        if self._is_closed:
            raise EngineClosedError("the LLM was closed")
        return False

    def _leads(self, wait: Wait, awaited: _AwaitedCommand | None = None) -> bool:
        """Return whether this thread leads, from here on or already; else the leader gets the
        command."""
        if self._leader is wait:
            return True
        with self._mutex:
            if self._leader is None:
                self._lead(wait)
                return True
            if self._leading_thread == threading.get_ident():
                raise EngineError(
                    "this thread is in the middle of a step, and cannot wait for another: do not "
                    "use an LLM in a signal handler or a finalizer"
                )
            if awaited is not None and not awaited.is_told:
                awaited.is_told = True
                self._loop.tell(awaited.run)
            self._waiting[wait] = None
            return False

    def _lead(self, wait: Wait) -> None:
        self._leader = wait
        self._leading_thread = threading.get_ident()
        self._waiting.pop(wait, None)

    def _step(self) -> None:
        self._loop.step()
        self._num_steps += 1
        if self._waiting:
            with self._mutex:
                for wait in [*self._waiting]:
                    if wait.each_step:
                        wait.ring()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.stop()  # a leader that does this for another thread takes no step after it
        self._loop.close()
        with self._mutex:
            for wait in [*self._waiting]:
                wait.ring()

    def _leave(self, wait: Wait) -> None:
        """End the wait. If this thread led, another waiting thread is woken, to lead."""
        try:
            while self._must_obey(wait):
                self._loop.obey()
        except BaseException:  # an interruption, here of all places
            self._must_obey(wait, can=False)
            raise

    def _must_obey(self, wait: Wait, can: bool = True) -> bool:
        """Return whether there are commands and no thread is left that would carry them out."""
        with self._mutex:
            self._waiting.pop(wait, None)
            if self._leader is wait:
                self._leader = None
            if self._leader is not None:
                return False
            for other in self._waiting:
                other.ring()
                return False
            if not (can and self._loop.has_commands):
                return False
            self._lead(wait)
            return True


class _AwaitedCommand:
    """A command whose result a thread waits for, in whichever thread it is carried out."""

    def __init__(self, command: Callable[[], object]):
        self.wait = Wait(lambda: self._is_done)
        self.is_told = False  # given to a leader
        self._command = command
        self._is_done = False
        self._result: object = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if self._is_done:
            return
        try:
            self._result = self._command()
        except ENDINGS:  # of the thread that carries it out
            self._error = EngineError("the thread that stepped the engine was interrupted")
            raise
        except BaseException as error:
            self._error = error
        finally:
            self._is_done = True
            self.wait.ring()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
