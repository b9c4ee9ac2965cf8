"""Who holds which KV block: reference counts, block tables, the LRU list, copy-on-write.

A block is a number here; the tensors behind it belong to the executor. Each block is in one of
three states, and their counts always add up to the size of the pool::

    used     referenced by one request or more
    cached   referenced by none, but the prefix cache knows its content; reused last, oldest first
    free     referenced by none, content worthless; reused first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from octavo.core.prefix_cache import NoPrefixCache, PrefixCache
from octavo.core.request import Request
from octavo.errors import EngineError


class BlockManager:
    """Owns every block of one KV pool.

    A method that returns a bool has changed nothing if it returns False.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None):
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache: PrefixCache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self.ref_counts = [0] * num_blocks
        # Unreferenced blocks, next to be reused first: the free ones, then the cached, by age.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_cached_blocks = 0
        self._copies: list[tuple[int, int]] = []

    # -- counts ------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation can take: free and cached."""
        return len(self.free_blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks) - self.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self.free_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def waste(self, requests: Iterable[Request]) -> float:
        """Share of the slots in used blocks that carry no token yet (internal fragmentation)."""
        empty, size, ref_counts = 0, self.block_size, self.ref_counts
        shared_tails: set[int] = set()
        for request in requests:
            table = request.block_ids
            if not table:
                continue
            tail = table[-1]
            if ref_counts[tail] > 1:
                if tail in shared_tails:
                    continue
                shared_tails.add(tail)
            empty += len(table) * size - request.num_computed_tokens
        return empty / (self.num_used_blocks * self.block_size) if self.num_used_blocks else 0.0

    # -- sharing -----------------------------------------------------------------------------

    def match(self, request: Request, limit: int) -> list[int]:
        """Cached blocks for the first tokens of a request, ``limit`` tokens at most."""
        return self.prefix_cache.match(request.token_ids, limit, request.cache_salt)

    def admit(
        self,
        request: Request,
        shared_blocks: Sequence[int],
        num_shared_tokens: int,
        num_tokens: int,
        headroom: int = 0,
    ) -> bool:
        """Give a request without blocks a table for its first ``num_tokens`` tokens.

        The table begins with ``shared_blocks``, which hold the KV of ``num_shared_tokens``
        tokens. ``headroom`` blocks must stay available::

            | shared_blocks (reference count + 1)    | new blocks      |
            | num_shared_tokens              |  ...... num_tokens      |
                                             ^ writing starts here; where that is inside a
                                               shared block, the block is copied first
        """
        assert not request.block_ids and request.num_computed_tokens == 0
        needed = self.blocks_for(num_tokens) - len(shared_blocks)
        needed += num_shared_tokens % self.block_size != 0  # the copy
        idle = sum(self.ref_counts[block_id] == 0 for block_id in shared_blocks)
        if needed + headroom > len(self.free_blocks) - idle:
            return False
        for block_id in shared_blocks:
            self._acquire(block_id)
        request.block_ids = list(shared_blocks)
        request.num_computed_tokens = num_shared_tokens
        request.num_published_blocks = 0
        allocated = self.allocate(request, num_tokens)
        assert allocated
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make the slots from the first uncomputed token up to ``num_tokens`` writable.

        Extends the table, and copies the block that is written first if others share it
        (copy-on-write). The copies are due before the next step: see ``take_copies``.
        """
        table = request.block_ids
        first_unscheduled = request.num_computed_tokens + request.num_tokens_in_flight
        first_written = first_unscheduled // self.block_size
        copy = first_written < len(table) and self.ref_counts[table[first_written]] > 1
        needed = -(-num_tokens // self.block_size) - len(table)  # a call less than blocks_for
        if needed <= 0 and not copy:  # as for nearly every token of an answer
            return True
        if max(needed, 0) + copy > len(self.free_blocks):
            return False
        if copy:
            (private,) = self._take(1)
            self._copies.append((table[first_written], private))
            self._release([table[first_written]])
            table[first_written] = private
        table += self._take(needed)
        return True

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks of a table that are not needed for its first ``num_tokens``."""
        table, needed = request.block_ids, self.blocks_for(num_tokens)
        self._release(reversed(table[needed:]))
        del table[needed:]

    @property
    def has_due_copies(self) -> bool:
        """Whether blocks are still to be copied before the next step."""
        return bool(self._copies)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (source, destination) copies since the last call, to be done in this order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def commit(self, request: Request) -> None:
        """Publish the blocks that became full and computed.

        If the cache already holds a block's content, the request adopts that block and its own is
        released: one content, one block, and no request is left reading a block that is free.
        """
        size, first = self.block_size, request.num_published_blocks
        num_full = request.num_computed_tokens // size
        if num_full == first:  # as after nearly every token of an answer
            return
        table, token_ids = request.block_ids, request.token_ids
        publish, salt = self.prefix_cache.publish, request.cache_salt
        last = table[first - 1] if first else None
        for index in range(first, num_full):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            own = table[index]
            last = publish(last, tokens, own, salt)
            if last != own:
                self._acquire(last)
                self._release([own])
                table[index] = last
        request.num_published_blocks = num_full

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, tail first, so that leaves are evicted first."""
        self._release(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = 0

    # -- blocks by number --------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        next_to_go, ref_counts, cache = self.free_blocks.popitem, self.ref_counts, self.prefix_cache
        taken = []
        for _ in range(count):
            block_id, _ = next_to_go(last=False)
            if block_id in cache:
                cache.forget(block_id)
                self.num_cached_blocks -= 1
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def _acquire(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0:
            del self.free_blocks[block_id]
            self.num_cached_blocks -= 1  # a match or an adoption: only cached blocks qualify
        self.ref_counts[block_id] += 1

    def _release(self, block_ids: Iterable[int]) -> None:
        ref_counts, free_blocks, cache = self.ref_counts, self.free_blocks, self.prefix_cache
        for block_id in block_ids:
            left = ref_counts[block_id] = ref_counts[block_id] - 1
            assert left >= 0
            if left > 0:
                continue
            free_blocks[block_id] = None
            if block_id in cache:
                self.num_cached_blocks += 1
            else:
                free_blocks.move_to_end(block_id, last=False)

    # -- audit -------------------------------------------------------------------------------

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Walk everything; raises an EngineError that names all that is inconsistent.

        ``requests`` are all that may hold blocks. Costs time in proportion to the pool.
        """
        violations = list(self._violations(requests))
        if violations:
            raise EngineError(f"the block pool is damaged: {'; '.join(violations)}")

    def _violations(self, requests: Iterable[Request]) -> Iterator[str]:
        held = [0] * self.num_blocks
        for request in requests:
            name = request.request_id
            if request.num_computed_tokens > len(request.block_ids) * self.block_size:
                yield f"{name} has computed more tokens than it has slots"
            if request.num_published_blocks > len(request.block_ids):
                yield f"{name} has published more blocks than it has"
            for block_id in request.block_ids:
                held[block_id] += 1
        if held != self.ref_counts:
            yield "reference counts and block tables disagree"
        if {block for block, count in enumerate(held) if count == 0} != set(self.free_blocks):
            yield "a held block is free, or a block is lost"
        num_cached = sum(block_id in self.prefix_cache for block_id in self.free_blocks)
        if num_cached != self.num_cached_blocks:
            yield f"{num_cached} blocks are cached, not {self.num_cached_blocks}"
