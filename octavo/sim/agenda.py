"""What is to happen when, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """Things to do, by the moment at which they are due; those of one moment in the order in which
    they were put down. ``now`` never goes back, and nobody asks a real clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Have something done. What should have been done in the past is done next."""
        heapq.heappush(self._due, (max(moment, self.now), next(self._numbers), action))

    def run(self, after_each_moment: Callable[[], None]) -> None:
        """Do all there is to do, and what comes of it; ``after_each_moment`` is called when
        everything that is due at one moment has been done."""
        due = self._due
        while due:
            self.now = due[0][0]
            while due and due[0][0] == self.now:
                heapq.heappop(due)[2]()
            after_each_moment()
