"""`ObserverGroup`, an observer that passes everything on to several others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineObserver, EngineState, Generation

_log = logging.getLogger("octavo.server")

_EVENTS = tuple(name for name in vars(EngineObserver) if name.startswith("on_"))


class ObserverGroup(EngineObserver):
    """Passes everything on to several observers, in their order.

    An observer that raises must not disturb the server: its exception is logged, the first time
    that it fails at an event, and the others and the caller go on.
    """

    def __init__(self, *observers: EngineObserver):
        # Only what an observer overrides is called: on_tokens comes thousands of times a second.
        self._listeners: dict[str, list[Callable[..., None]]] = {
            event: [
                getattr(observer, event)
                for observer in observers
                if getattr(type(observer), event) is not getattr(EngineObserver, event)
            ]
            for event in _EVENTS
        }
        self._failed: set[Callable[..., None]] = set()

    def on_submitted(self, generation: Generation) -> None:
        self._tell("on_submitted", generation)

    def on_rejected(self, reason: str) -> None:
        self._tell("on_rejected", reason)

    def on_ignored_fields(self, names: Sequence[str]) -> None:
        self._tell("on_ignored_fields", names)

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        self._tell("on_tokens", generation, num_tokens, gap)

    def on_finished(self, generation: Generation, reason: str) -> None:
        self._tell("on_finished", generation, reason)

    def on_step(self, stats: StepStats) -> None:
        self._tell("on_step", stats)

    def on_snapshot(self, step_id: int, snapshot: dict[str, Any]) -> None:
        self._tell("on_snapshot", step_id, snapshot)

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        self._tell("on_engine_state", state, detail)

    def _tell(self, event: str, *arguments: Any) -> None:
        for listener in self._listeners[event]:
            try:
                listener(*arguments)
            except Exception:
                if listener not in self._failed:
                    self._failed.add(listener)
                    _log.exception("%s failed; not said again", listener.__qualname__)
