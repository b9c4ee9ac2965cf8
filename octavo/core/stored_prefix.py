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

from octavo.core.block_store import Part, part_key
from octavo.core.kv_tables import GONE, Windows, first_kept, served_counts


class StoredPrefix:
    """What a store may add to a request's first blocks.

    Args:
        keys: of these blocks. path: those of the pool, no more of them (``PrefixCache.path``).
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        path: Sequence[Sequence[int]],
        windows: Windows,
        block_size: int,
    ):
        self._windows, self._block_size = windows, block_size
        unknown = [[GONE] * len(windows)] * (len(keys) - len(path))
        self._blocks = [*zip(keys, [*path, *unknown], strict=True)]

    def counts(self, has: Callable[[bytes], bool], after: int) -> list[int]:
        """Numbers of blocks beyond ``after`` with which a request can begin, where a store has the
        keys that it says to have."""
        rows = (
            [block_id != GONE or has(part_key(key, group)) for group, block_id in enumerate(row)]
            for key, row in self._blocks
        )
        served = served_counts(self._windows, rows, self._block_size)
        return [count for count in served if count > after]

    def parts(self, count: int) -> list[Part]:
        """What a store has to have for so many blocks: what the pool has not, and is seen."""
        num_tokens = count * self._block_size
        first = [first_kept(window, num_tokens, self._block_size) for window in self._windows]
        return [
            Part(group, number, part_key(key, group))
            for number, (key, row) in enumerate(self._blocks[:count])
            for group, block_id in enumerate(row)
            if block_id == GONE and number >= first[group]
        ]
