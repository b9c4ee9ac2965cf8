"""Search for damage in an idle block pool, a part at a time."""

from __future__ import annotations

from octavo.core.block_pools import Blocks

# Blocks of a part: it takes about a millisecond, the longest that a request has to wait for it.
_PART = 4096


class IdleAudit:
    """Checks every block of a pool without running requests, once after each ``restart``."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self.restart()

    def restart(self) -> None:
        """Begin again with the first block, since the pool has been used."""
        self._next = 0
        self._num_cached = 0

    @property
    def is_done(self) -> bool:
        return self._next >= self._blocks.num_blocks

    def advance(self) -> list[str]:
        """Check the next blocks; returns what is wrong with them."""
        blocks = self._blocks
        part = range(self._next, min(self._next + _PART, blocks.num_blocks))
        self._next = part.stop
        self._num_cached += sum(block_id in blocks.prefix_cache for block_id in part)
        held = [block_id for block_id in part if blocks.ref_counts[block_id] != 0]
        lost = [block_id for block_id in part if block_id not in blocks.free_blocks]
        found = []
        if held:
            found.append(
                f"{len(held)} blocks have references without a request, block {held[0]} first"
            )
        if lost:
            found.append(f"{len(lost)} blocks are lost, block {lost[0]} first")
        if self.is_done and self._num_cached != blocks.num_cached_blocks:
            found.append(f"{self._num_cached} blocks are cached, not {blocks.num_cached_blocks}")
        return found
