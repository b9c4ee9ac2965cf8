"""The events of a simulation, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """A queue of actions, each due at a moment; those of one moment run in the order in which they
    were added. ``now`` never goes back, and no real clock is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Schedule an action. One that was due in the past runs next."""
        heapq.heappush(self._due, (max(moment, self.now), next(self._numbers), action))

    def run(self, after_each_moment: Callable[[], None]) -> None:
        """Run all actions, and those that they schedule; ``after_each_moment`` is called when
        everything that is due at one moment has run."""
        due = self._due
        while due:
            self.now = due[0][0]
            while due and due[0][0] == self.now:
                heapq.heappop(due)[2]()
            after_each_moment()
