"""The engine's steps as they happen, for those who watch it live."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineClient, EngineObserver, EngineState, Generation

if TYPE_CHECKING:
    from octavo.server.watch.snapshot_stream import SnapshotViewer

_INTERVAL = 0.1  # seconds between two events: an engine makes hundreds of steps a second
_MOST_STEPS = 1000  # that wait for a viewer who does not read


class StepStream(EngineObserver):
    """Passes steps on to viewers. Without one, it does nothing."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self._close: set[SnapshotViewer] = set()  # those of them who look closely

    def watch(self) -> Viewer:
        """A viewer, until it is closed."""
        viewer = Viewer(self._viewers.discard)
        self._viewers.add(viewer)
        return viewer

    def watch_closely(self, engine: EngineClient, model: str) -> SnapshotViewer:
        """A viewer of whom the engine knows, until it is closed: see ``close_view.py``."""
        from octavo.server.watch.snapshot_stream import SnapshotViewer, about_engine

        def on_close(viewer: Viewer) -> None:
            self._viewers.discard(viewer)
            self._close.discard(viewer)
            if not self._close:
                engine.watch(False)

        viewer = SnapshotViewer(on_close, lambda: about_engine(engine, model))
        self._viewers.add(viewer)
        self._close.add(viewer)
        engine.watch(True)  # also of those who come later: each is shown how things stand
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

    def on_look(self, step_id: int, look: dict[str, Any]) -> None:
        for viewer in self._close:
            viewer.put_look(step_id, look)

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        for viewer in self._close:
            if gap is not None:
                viewer.put_gap(gap)
            elif generation.stats.num_output_tokens == 0:
                viewer.put_first_token(generation)

    def on_finished(self, generation: Generation, reason: str) -> None:
        for viewer in self._close:
            viewer.put_end(generation, reason)

    def on_rejected(self, reason: str) -> None:
        for viewer in self._close:
            viewer.put_rejection(reason)

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        for viewer in self._viewers:
            viewer.put_state(state, detail)


class Viewer:
    """What one client has yet to be sent. Who reads too slowly misses the oldest steps."""

    num_pending_chars = 0  # bounded here, so no reason to cut a connection

    def __init__(self, on_close: Callable[[Viewer], None]):
        self._on_close = on_close
        self._steps: deque[StepStats] = deque(maxlen=_MOST_STEPS)
        self._num_missed = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)  # up to the last state
        self._has_news = asyncio.Event()
        self._is_over = False

    def put(self, stats: StepStats) -> None:
        self._num_missed += len(self._steps) == _MOST_STEPS
        self._steps.append(stats)
        self._has_news.set()

    def put_state(self, state: EngineState, detail: str) -> None:
        self._close_event()  # steps of an engine come before it is said that it died
        self._events.append({"engine": state.value, "detail": detail})
        self._has_news.set()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """``{"engine", "detail"}`` when the engine's state changes, and ``{"missed", "steps"}``:
        the fields of ``StepStats`` of the steps since the last event."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            self._close_event()
            while self._events:
                yield self._events.popleft()
            if self._is_over:
                return
            await asyncio.sleep(self._interval())

    def _interval(self) -> float:
        """Seconds between two events, at least."""
        return _INTERVAL

    def _close_event(self) -> None:
        """Make an event of all that has come since the last one, if anything has."""
        if event := self._take_news():
            self._events.append(event)

    def _take_news(self) -> dict[str, Any]:
        if not self._steps:
            return {}
        news = {"missed": self._num_missed, **self._told(self._steps)}
        self._steps.clear()
        self._num_missed = 0
        return news

    def _told(self, steps: Sequence[StepStats]) -> dict[str, Any]:
        """Of steps, at least one, what an event says."""
        return {"steps": [each.as_json() for each in steps]}

    def end(self) -> None:
        self._is_over = True
        self._has_news.set()

    def close(self) -> None:
        self._on_close(self)
