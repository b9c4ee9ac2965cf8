"""Copying blocks that only the pool has to a store, a few at a time, while no request runs.

Evicted blocks are stored at once. Without this, blocks that were never evicted would be lost with
the pool.
"""

from __future__ import annotations

from octavo.core.block_pools import Blocks

# Blocks of a part: copying them takes some milliseconds, the longest that a new request waits.
_PART = 16


class IdleOffload:
    """Goes over the cached, unreferenced blocks of a pool, once after each ``restart``.

    Those that were used longest ago come first, as if they had been evicted.
    """

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._left: list[int] = []  # the last is the next
        self.restart()

    def restart(self) -> None:
        """Begin again, since the pool has been used."""
        self._has_begun = False

    @property
    def is_done(self) -> bool:
        return not self._blocks.store.saves_ahead or (self._has_begun and not self._left)

    def next_copies(self) -> tuple[tuple[int, int], ...]:
        """Return copies to be made now. There may be none: blocks may be stored already, or the
        store be full."""
        if not self._has_begun:
            self._left = list(self._blocks.free_blocks)[::-1]
            self._has_begun = True
        store = self._blocks.store
        copies: list[tuple[int, int]] = []
        for _ in range(min(_PART, len(self._left))):
            if not store.has_room:
                break
            copies += self._blocks.save_if_cached(self._left.pop())
        return tuple(copies)
