"""Clocks of real and of virtual time; the engine is given one, so that it can be simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back. The zero point has no meaning."""

    def now(self) -> float: ...


class WallClock:
    """Real time. No other code of :mod:`octavo.core` reads it."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Simulated time: it moves only when it is told to."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, moment: float) -> None:
        """Move to ``moment``; a moment in the past leaves the clock where it is."""
        self._now = max(self._now, moment)
