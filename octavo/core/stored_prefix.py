"""The part of a prompt that the pool and a store know together, and the blocks that are missing.

The first blocks of a request, in groups of layers (``kv_tables.py``); the pool has some of each::

    window  blocks                     key
    None    [ 3 ][ 8 ][ - ][ - ]       k0   k1   k2   k3
    3       [ - ][ 9 ][ - ][ - ]       k0'  k1'  k2'  k3'

With k2, k3 and k3' from a store, a request goes on after four blocks: no query that follows attends
to the other blocks of the windowed group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.block_store import BlockPart, part_key
from octavo.core.kv_tables import GONE, Windows, first_kept, served_counts


class StoredPrefix:
    """The blocks that a store may add to a request's first blocks.

    Args:
        keys: the keys of these blocks.
        path: the pool's blocks, no more than keys (``PrefixCache.path``).
        num_known: the number of blocks that a request can begin with, without the store.
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
        # Blocks before this are in the pool, or are not attended to after more blocks.
        seen = zip(windows, self._first_seen(num_known), strict=True)
        self._first = min([num_known, *(first for window, first in seen if window is not None)])
        unknown = [[GONE] * len(windows)] * (len(keys) - len(path))
        self._blocks = [*zip(keys[self._first :], [*path[self._first :], *unknown], strict=True)]

    def counts(self, has: Callable[[bytes], bool]) -> list[int]:
        """Return the numbers of blocks, larger than ``num_known``, with which a request can begin
        if a store has the keys for which ``has`` is true."""
        rows = (
            [block_id != GONE or has(part_key(key, group)) for group, block_id in enumerate(row)]
            for key, row in self._blocks
        )
        served = served_counts(self._windows, rows, self._block_size, self._first)
        return [count for count in served if count > self._num_known]

    def parts(self, count: int) -> list[BlockPart]:
        """Return the parts that a store has to have for ``count`` blocks: those that are needed,
        and not in the pool."""
        first_seen = self._first_seen(count)
        blocks = self._blocks[: count - self._first]
        return [
            BlockPart(group, number, part_key(key, group))
            for number, (key, row) in enumerate(blocks, start=self._first)
            for group, block_id in enumerate(row)
            if block_id == GONE and number >= first_seen[group]
        ]

    def _first_seen(self, count: int) -> list[int]:
        """Return the first block of each group that is attended to after ``count`` blocks."""
        num_tokens = count * self._block_size
        return [first_kept(window, num_tokens, self._block_size) for window in self._windows]
