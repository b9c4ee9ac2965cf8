"""The engine's steps as they happen, for those who watch it live."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineState, Observer

_INTERVAL = 0.1  # seconds between two events: an engine makes hundreds of steps a second
_MOST_STEPS = 1000  # that wait for a viewer who does not read


class StepStream(Observer):
    """Passes steps on to viewers. Without one, it does nothing."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()

    def watch(self) -> Viewer:
        """A viewer, until it is closed."""
        viewer = Viewer(self._viewers.discard)
        self._viewers.add(viewer)
        return viewer

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def end(self) -> None:
        """There will be no more steps: viewers get what is there, and no more."""
        for viewer in self._viewers:
            viewer.end()

    def on_step(self, stats: StepStats) -> None:
        for viewer in self._viewers:
            viewer.put(stats)

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        for viewer in self._viewers:
            viewer.put_state(state, detail)


class Viewer:
    """What one client has yet to be sent. Who reads too slowly misses the oldest steps."""

    num_pending_chars = 0  # bounded here, so no reason to cut a connection

    def __init__(self, on_close: Callable[[Viewer], None]):
        self._on_close = on_close
        self._steps: deque[StepStats] = deque(maxlen=_MOST_STEPS)
        self._states: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)
        self._num_missed = 0
        self._has_news = asyncio.Event()
        self._is_over = False

    def put(self, stats: StepStats) -> None:
        self._num_missed += len(self._steps) == _MOST_STEPS
        self._steps.append(stats)
        self._has_news.set()

    def put_state(self, state: EngineState, detail: str) -> None:
        self._states.append({"engine": state.value, "detail": detail})
        self._has_news.set()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """``{"engine", "detail"}`` when the engine's state changes, and ``{"missed", "steps"}``:
        the fields of ``StepStats`` of the steps since the last event."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._states:
                yield self._states.popleft()
            if self._steps:
                yield self._take_steps()
            if self._is_over:
                return
            await asyncio.sleep(_INTERVAL)

    def _take_steps(self) -> dict[str, Any]:
        taken = {"missed": self._num_missed, "steps": [each.as_json() for each in self._steps]}
        self._steps.clear()
        self._num_missed = 0
        return taken

    def end(self) -> None:
        self._is_over = True
        self._has_news.set()

    def close(self) -> None:
        self._on_close(self)
