"""Bringing what only the pool holds to the store, a few blocks at a time, while nothing runs.

What is evicted is stored at once. Without this, all that was never evicted would end with the pool.
"""

from __future__ import annotations

from octavo.core.block_manager import BlockManager

# Blocks of a part: copying them takes some milliseconds, the longest that a request waits for it.
_PART = 16


class IdleSaving:
    """Goes over the cached blocks of a pool that nobody holds any of, once after each ``restart``.

    Those that were used longest ago come first, as if they had been evicted.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._left: list[int] = []  # the last is the next
        self.restart()

    def restart(self) -> None:
        """The pool has been used: begin anew."""
        self._has_begun = False

    @property
    def is_done(self) -> bool:
        return not self._blocks.store.saves_ahead or (self._has_begun and not self._left)

    def next_copies(self) -> tuple[tuple[int, int], ...]:
        """Copies to be made now. They may be none: what comes next may be stored already, or the
        store have no room."""
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
