"""Tiles of keys that the items of a step's attention go through, and the keys that a query sees.

An item is several consecutive queries of one request. Keys and queries are identified by their
slots: for a request with a sink window (``core/sink_window.py``) these are its positions minus the
tokens left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

KEY_TILE = 64

# Rotations of a query: as its key is, as keys of the turn before need it, and as sinks do.
OWN, TURN_BEFORE, FOR_SINKS = range(3)


class KeyTiles(NamedTuple):
    """Tiles of each item, [items, tiles]; items with fewer tiles have hidden ones."""

    first_key: np.ndarray
    low: np.ndarray  # no query of the item sees a key before this one, or after ``high``
    high: np.ndarray
    is_sink: np.ndarray


class Visibility(Protocol):
    """Rules for which keys a query sees.

    ``request`` [items] are the requests of items, ``first`` and ``last`` [items] their outermost
    queries.
    """

    def num_tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Number of tiles of each item: [items]."""
        ...

    def tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> KeyTiles: ...

    def hidden(
        self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray, key: np.ndarray
    ) -> np.ndarray:
        """True where queries [items, 1, queries, 1] do not see keys [items, tiles, 1, KEY_TILE]."""
        ...

    def rotations(self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray) -> np.ndarray:
        """Rotation of queries [items, 1, queries] for each tile: [items, 1 or tiles, queries]."""
        ...


@dataclass(frozen=True, slots=True)
class Windowed:
    """Visibility of the last ``window`` keys, the query's own included; of all keys if it is
    None."""

    window: int | None

    def num_tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return _tiles_between(self._first_seen(first), last)

    def tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> KeyTiles:
        low = self._first_seen(first)
        index = np.arange(_tiles_between(low, last).max())
        first_key = (low[:, None] // KEY_TILE + index) * KEY_TILE
        return KeyTiles(
            first_key, low[:, None], last[:, None], np.zeros_like(first_key, dtype=bool)
        )

    def hidden(
        self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray, key: np.ndarray
    ) -> np.ndarray:
        hidden: np.ndarray = key > query
        if self.window is not None:
            hidden |= query - key >= self.window
        return hidden

    def rotations(self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray) -> np.ndarray:
        return np.full_like(query, OWN)

    def _first_seen(self, slot: np.ndarray) -> np.ndarray:
        return slot * 0 if self.window is None else np.maximum(slot - self.window + 1, 0)


@dataclass(frozen=True, slots=True)
class BothWays(Windowed):
    """Visibility of keys before and after a query alike: of those less than ``window`` away, or of
    all. ``seq_lens`` [requests] are the tokens of each request."""

    seq_lens: np.ndarray

    def num_tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return Windowed.num_tiles(self, request, first, self._last_seen(request, last))

    def tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> KeyTiles:
        return Windowed.tiles(self, request, first, self._last_seen(request, last))

    def hidden(
        self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray, key: np.ndarray
    ) -> np.ndarray:
        hidden: np.ndarray = key > self._last_seen(request[:, None, None, None], query)
        if self.window is not None:
            hidden = hidden | (query - key >= self.window)
        return hidden

    def _last_seen(self, request: np.ndarray, slot: np.ndarray) -> np.ndarray:
        end = self.seq_lens[request] - 1
        return end if self.window is None else np.minimum(slot + self.window - 1, end)


class SinkWindowLike(Protocol):
    """A request's sink window, as in ``core/sink_window.py``."""

    @property
    def sinks(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def turn(self) -> int: ...


_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True)
class StepSinkWindows:
    """The sink windows of a step's requests, one for each: the reference of ``csrc/sink_window.h``.

    Fields of the windows, int64 [S], and the tokens behind their sinks that have no slots. A
    request that sees everything has no sinks, and a window and a turn that never end: its sums are
    those that it has alone.
    """

    sinks: np.ndarray
    window: np.ndarray
    stride: np.ndarray
    turn: np.ndarray
    left_out: np.ndarray

    @classmethod
    def of(cls, sink_windows: Sequence[tuple[SinkWindowLike, int] | None]) -> StepSinkWindows:
        """Collect the windows of requests, each with its number of left-out tokens; None sees
        everything."""
        fields = [(0, _ENDLESS, 1, _ENDLESS, 0)] * len(sink_windows)
        for index, one in enumerate(sink_windows):
            if one is not None:
                of, left_out = one
                fields[index] = of.sinks, of.window, of.stride, of.turn, left_out
        return cls(*np.array(fields, dtype=np.int64).T)

    def num_angles(self, num_slots: np.ndarray) -> int:
        """Number of positions that rotations are needed for, given the slots of each request."""
        ends = num_slots + self.left_out
        return int(np.where(ends <= self.turn, ends, self.turn + self.window).max())

    def angles(self, request: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions by which queries are rotated for TURN_BEFORE and FOR_SINKS; any valid position
        where a rotation is not needed."""
        turn, at = self.turn[request], slot + self.left_out[request]
        before = at % turn + turn
        is_needed = (before < turn + self.window[request]) & (at >= turn)
        for_sinks = slot - (self._first_seen(request, slot) - self.sinks[request])
        return np.where(is_needed, before, 0), np.where(self.sinks[request] > 0, for_sinks, 0)

    def num_tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        behind = _tiles_between(self._first_seen(request, first), last)
        return self._sink_tiles(request, last) + np.maximum(behind, 0)

    def tiles(self, request: np.ndarray, first: np.ndarray, last: np.ndarray) -> KeyTiles:
        num_sinks, low = self._sink_tiles(request, last), self._first_seen(request, first)
        index = np.arange(self.num_tiles(request, first, last).max())
        is_sink = index < num_sinks[:, None]
        behind = low[:, None] // KEY_TILE + index - num_sinks[:, None]
        return KeyTiles(
            np.where(is_sink, index, behind) * KEY_TILE,
            np.where(is_sink, 0, low[:, None]),
            np.where(is_sink, self._last_sink(request, last)[:, None], last[:, None]),
            is_sink,
        )

    def hidden(
        self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray, key: np.ndarray
    ) -> np.ndarray:
        request = request[:, None, None, None]
        is_behind = key < self._first_seen(request, query)
        is_no_sink = key >= self.sinks[request]
        hidden: np.ndarray = np.where(tiles.is_sink[:, :, None, None], is_no_sink, is_behind)
        return hidden | (key > query)

    def rotations(self, request: np.ndarray, tiles: KeyTiles, query: np.ndarray) -> np.ndarray:
        request = request[:, None, None]
        turn, left_out = self.turn[request], self.left_out[request]
        turns = (query + left_out) // turn - (tiles.first_key[:, :, None] + left_out) // turn
        return np.where(tiles.is_sink[:, :, None], FOR_SINKS, turns.clip(OWN, TURN_BEFORE))

    def _first_seen(self, request: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """The first key behind the sinks that a query sees."""
        sinks, stride, left_out = self.sinks[request], self.stride[request], self.left_out[request]
        beyond = np.maximum(slot + left_out + 1 - sinks - self.window[request], 0)
        first: np.ndarray = sinks + -(-beyond // stride) * stride - left_out
        return first

    def _last_sink(self, request: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The last sink that items see; -1 for none."""
        return np.minimum(self.sinks[request] - 1, last)

    def _sink_tiles(self, request: np.ndarray, last: np.ndarray) -> np.ndarray:
        return self._last_sink(request, last) // KEY_TILE + 1


def _tiles_between(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    tiles: np.ndarray = last // KEY_TILE - first // KEY_TILE + 1
    return tiles
