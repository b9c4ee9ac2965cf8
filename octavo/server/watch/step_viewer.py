"""One client of ``GET /steps``, with the steps that it has yet to be sent in bounded memory."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineState

_INTERVAL = 0.1  # seconds between two events: an engine makes hundreds of steps a second
_MOST_STEPS = 1000  # that wait for a viewer that does not read


class StepViewer:
    """Buffers steps for one client. A client that reads too slowly misses the oldest."""

    num_pending_chars = 0  # bounded here, so no reason to cut a connection

    def __init__(self, on_close: Callable[[StepViewer], None]):
        self._on_close = on_close
        self._steps: dict[int | None, deque[StepStats]] = {}  # by replica
        self._num_missed: Counter[int | None] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)  # up to the last state
        self._has_news = asyncio.Event()
        self._is_over = False

    def put(self, stats: StepStats, replica: int | None = None) -> None:
        steps = self._steps.setdefault(replica, deque(maxlen=_MOST_STEPS))
        self._num_missed[replica] += len(steps) == _MOST_STEPS
        steps.append(stats)
        self._has_news.set()

    def put_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        self._close_event()  # steps of an engine come before the event of its death
        self._events.append({**named(replica), "engine": state.value, "detail": detail})
        self._has_news.set()

    def put_removal(self, replica: int) -> None:
        self._close_event()
        self._steps.pop(replica, None)
        self._events.append({**named(replica), "engine": "removed", "detail": ""})
        self._has_news.set()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an event when the engine's state changes, and one for the steps since the last
        event.

        They are ``{"engine", "detail"}``, and ``{"missed", "steps"}`` with the fields of
        ``StepStats``. Where there are several replicas, each event also has ``replica``.
        """
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
        """Return the least seconds between two events."""
        return _INTERVAL

    def _close_event(self) -> None:
        """Make an event of all that has come since the last one, if anything has."""
        self._events.extend(self._take_news())

    def _take_news(self) -> list[dict[str, Any]]:
        """Return an event for each replica, or one for all."""
        news = [
            {**named(replica), **self._news_of(replica, steps)}
            for replica, steps in self._steps.items()
            if steps
        ]
        for steps in self._steps.values():
            steps.clear()
        self._num_missed.clear()
        return news

    def _news_of(self, replica: int | None, steps: Sequence[StepStats]) -> dict[str, Any]:
        return {"missed": self._num_missed[replica], **self._steps_event(steps)}

    def _steps_event(self, steps: Sequence[StepStats]) -> dict[str, Any]:
        """Return the members of an event about steps, of which there is at least one."""
        return {"steps": [each.as_json() for each in steps]}

    def end(self) -> None:
        self._is_over = True
        self._has_news.set()

    def close(self) -> None:
        self._on_close(self)


def named(replica: int | None) -> dict[str, Any]:
    """Return the member of an event that names its replica; none where there is one engine."""
    return {} if replica is None else {"replica": replica}
