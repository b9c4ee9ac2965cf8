"""The loop around a `TextEngine`: obey, step, deliver.

    LLM                     calls `step` whenever it waits for something, in the thread of one of
                            its callers at a time (`SharedEngineLoop`)
    AsyncLLM                has a thread in `run`; coroutines `tell` it what to do
    server/engine/worker    has its main thread in `run`; another one receives messages for it

All who drive an engine drive it with this one.
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
    """Steps an engine, obeys commands between two steps, and hands over what each step brought.

    Nobody else may touch the engine while ``run`` runs: who has something to ask of it tells the
    driver. A command that raises is logged, and nothing else happens: no request can end the loop.

    Args:
        deliver: called after each step, in the thread that drives. What it raises ends the loop.
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
        """Have something done between two steps."""
        self._commands.put(command)

    def stop(self) -> None:
        """Have ``run`` return, after the step that is under way."""
        self._is_stopping = True
        self.tell(_wake_up)

    # -- in the thread that drives -------------------------------------------------------------

    def run(self) -> None:
        """Obey and step until ``stop``; then abort everything and release the engine."""
        while not self._is_stopping:
            if self.engine.has_unfinished_requests:
                self.step()
            else:
                self._look_over()
                while self._commands.empty() and self.engine.engine.save():
                    pass
                self.carry_out(self._commands.get())
        self.close()

    def step(self) -> None:
        """Obey, run one step, and deliver what it brought."""
        self.obey()
        if self._is_stopping:
            return
        deltas, step = self.engine.step()
        if step is not None:
            self._deliver(deltas, step)
        self._look_over()

    @property
    def has_commands(self) -> bool:
        return not self._commands.empty()

    def obey(self) -> None:
        """Do what it has been told by now."""
        # What comes meanwhile waits for the next step: a flood of commands does not hold up all.
        for _ in range(self._commands.qsize()):
            self.carry_out(self._commands.get())

    def carry_out(self, command: Command) -> None:
        """Do something whose failure is nobody else's: it is logged, and that is all."""
        try:
            command()
        except ENDINGS:
            raise
        except BaseException:
            _log.exception("a command to the engine failed")

    def close(self) -> None:
        """Abort everything and release the engine. May be repeated."""
        self.engine.engine.close()

    def _look_over(self) -> None:
        """Have the engine look for damage, as long as there is nothing else to do."""
        while self._commands.empty() and self.engine.engine.audit():
            pass


def _wake_up() -> None:
    """The command that does nothing but end a wait for commands."""
