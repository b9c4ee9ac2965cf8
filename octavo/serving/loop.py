"""The loop around a `TextEngine`, which carries out commands, steps it and delivers deltas.

LLM                     calls `step` whenever it waits for something, in the thread of one of
                        its callers at a time (`SharedEngineLoop`)
AsyncLLM                has a thread in `run`; coroutines `tell` it what to do
server/engine/worker    has its main thread in `run`; another one receives messages for it
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from octavo.base.errors import ENDINGS
from octavo.core.engine import EngineStep
from octavo.serving.outputs import Delta
from octavo.serving.text_engine import TextEngine

_log = logging.getLogger("octavo")

Command = Callable[[], object]


class EngineLoop:
    """Steps an engine, carries out commands between two steps, and delivers the deltas of each
    step.

    No other code may touch the engine while ``run`` runs: it gives commands to the loop instead. A
    command that raises is logged, and nothing else happens: no request can end the loop.

    Args:
        deliver: called after each step, in the loop's thread. An exception from it ends the loop.
    """

    def __init__(self, engine: TextEngine, deliver: Callable[[list[Delta], EngineStep], None]):
        self.engine = engine
        self._deliver = deliver
        # `put` of this kind of queue may be called from anywhere, also where a garbage collection
        # has interrupted another `put`.
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False

    # -- from any thread, and from finalizers -------------------------------------------------

    def tell(self, command: Command) -> None:
        """Have a command carried out between two steps."""
        self._commands.put(command)

    def stop(self) -> None:
        """Have ``run`` return, after the step that is under way."""
        self._is_stopping = True
        self.tell(_wake_up)

    # -- in the loop's thread -------------------------------------------------------------------

    def run(self) -> None:
        """Carry out commands and step until ``stop``; then abort everything and release the
        engine."""
        while not self._is_stopping:
            if self.engine.has_unfinished_requests:
                self.step()
            else:
                self._audit()
                while self._commands.empty() and self.engine.engine.save():
                    pass
                self.carry_out(self._commands.get())
        self.close()

    def step(self) -> None:
        """Carry out commands, run one step, and deliver its deltas."""
        self.obey()
        if self._is_stopping:
            return
        deltas, step = self.engine.step()
        if step is not None:
            self._deliver(deltas, step)
        self._audit()

    @property
    def has_commands(self) -> bool:
        return not self._commands.empty()

    def obey(self) -> None:
        """Carry out the commands that were given by now."""
        # Commands that come meanwhile wait for the next step, so that a flood of them delays no
        # step.
        for _ in range(self._commands.qsize()):
            self.carry_out(self._commands.get())

    def carry_out(self, command: Command) -> None:
        """Carry out a command; its failure is logged, and affects nothing else."""
        try:
            command()
        except ENDINGS:
            raise
        except BaseException:
            _log.exception("a command to the engine failed")

    def close(self) -> None:
        """Abort everything and release the engine. May be repeated."""
        self.engine.engine.close()

    def _audit(self) -> None:
        """Have the engine audit its blocks, as long as there is nothing else to do."""
        while self._commands.empty() and self.engine.engine.audit():
            pass


def _wake_up() -> None:
    """Do nothing: a command that ends a wait for commands."""
