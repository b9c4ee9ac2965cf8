"""How far a request's prompt is known to the pool and a store together, and what of it is missing.

The first blocks of a request, in groups of layers (``kv_tables.py``); the pool has some of each::

    window  blocks                     key
    None    [ 3 ][ 8 ][ - ][ - ]       k0   k1   k2   k3
    3       [ - ][ 9 ][ - ][ - ]       k0'  k1'  k2'  k3'

With k2, k3 and k3' from a store, a request goes on after four blocks: no query that follows sees
what the windowed group had of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.block_store import BlockPart, part_key
from octavo.core.kv_tables import GONE, Windows, first_kept, served_counts


class StoredPrefix:
    """What a store may add to a request's first blocks.

    Args:
        keys: of these blocks. path: those of the pool, no more of them (``PrefixCache.path``).
        num_known: of them, that a request can begin with as it is.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        path: Sequence[Sequence[int]],
        num_known: int,
        windows: Windows,
        block_size: int,
    ):
        self._windows, self._block_size = windows, block_size
        self._num_known = num_known
        # What comes before this is there already, or seen by nobody who begins with more blocks.
        seen = zip(windows, self._first_seen(num_known), strict=True)
        self._first = min([num_known, *(first for window, first in seen if window is not None)])
        unknown = [[GONE] * len(windows)] * (len(keys) - len(path))
        self._blocks = [*zip(keys[self._first :], [*path[self._first :], *unknown], strict=True)]

    def counts(self, has: Callable[[bytes], bool]) -> list[int]:
        """Numbers of blocks, more than are known, with which a request can begin if a store has the
        keys that it says to have."""
        rows = (
            [block_id != GONE or has(part_key(key, group)) for group, block_id in enumerate(row)]
            for key, row in self._blocks
        )
        served = served_counts(self._windows, rows, self._block_size, self._first)
        return [count for count in served if count > self._num_known]

    def parts(self, count: int) -> list[BlockPart]:
        """What a store has to have for so many blocks: what the pool has not, and is seen."""
        first_seen = self._first_seen(count)
        blocks = self._blocks[: count - self._first]
        return [
            BlockPart(group, number, part_key(key, group))
            for number, (key, row) in enumerate(blocks, start=self._first)
            for group, block_id in enumerate(row)
            if block_id == GONE and number >= first_seen[group]
        ]

    def _first_seen(self, count: int) -> list[int]:
        """Of each group, the first block that is seen after so many."""
        num_tokens = count * self._block_size
        return [first_kept(window, num_tokens, self._block_size) for window in self._windows]
