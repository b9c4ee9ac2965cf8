"""What the items of a step's attention see, where requests keep sinks and a window (core/sight.py).

The reference of what ``csrc/sight.h`` says in C++. A request that sees all has no sinks, and a
window and a turn that never end: its sums are those that it has without company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.sight import Sight

_ALL = Sight(0, 1 << 40)

# How a query may be rotated: as its key is, as keys of the turn before want, and as the sinks do.
OWN, TURN_BEFORE, FOR_SINKS = range(3)


@dataclass(frozen=True, slots=True)
class StepSights:
    """Of each request of a step, int64 [S]: the fields of its ``Sight``, and the tokens behind its
    sinks that have no slots."""

    sinks: np.ndarray
    window: np.ndarray
    stride: np.ndarray
    turn: np.ndarray
    left_out: np.ndarray

    @classmethod
    def of(cls, sights: Sequence[tuple[Sight, int] | None]) -> StepSights:
        each = [(_ALL, 0) if one is None else one for one in sights]
        fields = [(s.sinks, s.window, s.stride, s.turn, left_out) for s, left_out in each]
        return cls(*np.array(fields, dtype=np.int64).T)

    def num_angles(self, num_slots: np.ndarray) -> int:
        """Positions that rotations are needed for, of requests that have so many slots."""
        ends = num_slots + self.left_out
        return int(np.where(ends <= self.turn, ends, self.turn + self.window).max())

    def first_seen(self, request: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """The first slot behind the sinks that a query in ``slot`` sees."""
        sinks, stride, left_out = self.sinks[request], self.stride[request], self.left_out[request]
        beyond = np.maximum(slot + left_out + 1 - sinks - self.window[request], 0)
        first: np.ndarray = sinks + -(-beyond // stride) * stride - left_out
        return first

    def angles(self, request: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The positions by which queries in slots are rotated, as the turn before theirs wants and
        as the sinks do; any that there is a rotation of, where none is needed."""
        turn, left_out = self.turn[request], self.left_out[request]
        before = (slot + left_out) % turn + turn
        is_needed = before < turn + self.window[request]
        is_needed &= slot + left_out >= turn
        for_sinks = slot - (self.first_seen(request, slot) - self.sinks[request])
        return np.where(is_needed, before, 0), np.where(self.sinks[request] > 0, for_sinks, 0)

    def rotations(
        self, request: np.ndarray, query: np.ndarray, key: np.ndarray, is_sink: np.ndarray
    ) -> np.ndarray:
        """How queries in slots ``query`` [items, 1, queries] are rotated for tiles of keys that
        begin in slots ``key`` [items, tiles, 1]: OWN, TURN_BEFORE or FOR_SINKS."""
        turn, left_out = self.turn[request], self.left_out[request]
        turns = (query + left_out) // turn - (key + left_out) // turn
        return np.where(is_sink, FOR_SINKS, turns.clip(OWN, TURN_BEFORE))
