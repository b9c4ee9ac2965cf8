"""Owner of the KV pool's blocks, with block tables, sharing, copy-on-write and LRU eviction.

A block is a number here; the tensors behind it belong to the executor. Each block is in one of
three states, and their counts always add up to the size of the pool::

    used     referenced by one request or more
    cached   referenced by none, but the prefix cache knows its content; reused last, oldest first
    free     referenced by none, content worthless; reused first

A request has a table of blocks for each group of layers (``kv_tables.py``): nearly always one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from octavo.base.errors import EngineError
from octavo.core.batch import ScheduledRequest
from octavo.core.block_store import NOTHING_STORED, BlockStore, NoBlockStore, Stored
from octavo.core.kv_tables import GONE, ONE_TABLE, Windows, first_kept, longest_sequence
from octavo.core.prefix_cache import MissReason, NoPrefixCache, PrefixCache
from octavo.core.request import Request
from octavo.core.sink_window import SinkWindow
from octavo.core.state_slots import NoStates, States
from octavo.core.state_types import NO_STATE


class SharedPrefix(NamedTuple):
    """The KV of a request's first tokens that other requests have computed already."""

    num_tokens: int
    tables: Sequence[list[int]]  # of each group of layers; all as long
    stored: Stored = NOTHING_STORED  # only the store has these: the tables say ``GONE``
    state: int = NO_STATE  # the slot of the state after them


class BlockManager:
    """Owns every block of one KV pool.

    A method that returns a bool has changed nothing if it returns False.

    Args:
        windows: the positions that each group of layers with tables of its own attends to.
        store: receives evicted blocks; only for models without recurrent layers.
        states: the state slots of the model's recurrent layers, if it has any.
        first_block, ref_counts: of one of several pools, the number of its first block, and the
            reference counts of the blocks of all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        windows: Windows = ONE_TABLE,
        store: BlockStore | None = None,
        states: States | None = None,
        first_block: int = 0,
        ref_counts: list[int] | None = None,
    ):
        assert store is None or states is None
        assert num_blocks > 0 and block_size > 0
        assert list(windows) == sorted(windows, key=lambda window: window is not None), windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_tables = len(windows)
        self.has_windows = windows[-1] is not None
        self.nothing_shared = SharedPrefix(0, [[] for _ in windows])
        self.prefix_cache: PrefixCache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self.store: BlockStore = NoBlockStore() if store is None else store
        self.states: States = NoStates() if states is None else states
        self.ref_counts = [0] * num_blocks if ref_counts is None else ref_counts
        self._ids = range(first_block, first_block + num_blocks)
        # Unreferenced blocks, next to be reused first: the free ones, then the cached, by age.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(self._ids)
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
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def longest_sequence(self, step_tokens: int, limit: int) -> int:
        """Return the number of tokens that one request can have slots for, up to ``limit``, if no
        step computes more than ``step_tokens`` of them."""
        return longest_sequence(self.windows, self.num_blocks, self.block_size, step_tokens, limit)

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
            for further in request.further_tables:
                empty += len(further) * size - request.num_computed_tokens
        return empty / (self.num_used_blocks * self.block_size) if self.num_used_blocks else 0.0

    # -- of one pool: with several, ``block_pools.py`` ----------------------------------------

    def place(
        self,
        request: Request,
        running: Collection[Request],
        shared_of: Callable[[Request], SharedPrefix],
    ) -> SharedPrefix:
        """Choose the pool of a request that is to be admitted, and return what it shares there,
        which ``shared_of`` says of a request with its ``pool``."""
        return shared_of(request)

    def headroom(self, request: Request, running: Collection[Request]) -> int:
        """Return how many blocks to leave to running requests when another one is admitted: one of
        each table, so that it is not preempted at once."""
        return len(running) * self.num_tables

    def rivals(self, request: Request, others: list[Request]) -> list[Request]:
        """Return those of other requests whose blocks could serve a request."""
        return others

    def in_order(self, items: Collection[ScheduledRequest]) -> Collection[ScheduledRequest]:
        """Return the items of a step in the order of their pools."""
        return items

    # -- sharing -----------------------------------------------------------------------------

    def match(self, request: Request, limit: int) -> SharedPrefix:
        """Return cached and stored blocks for the first tokens of a request, ``limit`` tokens at
        most; none for a request that takes no part in caches."""
        if not request.params.cache_prompt:
            return self.nothing_shared
        if request.sink_window is not None:
            limit = min(limit, request.sink_window.num_tokens)
        cached = self.prefix_cache.match(request.token_ids, limit, request.cache_salt)
        shared = self.nothing_shared
        if cached:
            tables = [[*table] for table in zip(*cached, strict=True)]
            state = self.prefix_cache.state_of(cached[-1][0]) if self.states.exist else NO_STATE
            shared = self._shared(len(cached) * self.block_size, tables, request.sink_window, state)
        if isinstance(self.store, NoBlockStore):
            return shared
        return self._with_stored(request, shared, limit)

    def _with_stored(self, request: Request, cached: SharedPrefix, limit: int) -> SharedPrefix:
        """Add the blocks that the store has of a request to those of the pool."""
        if request.sink_window is not None:  # restored blocks must not be given back at once
            limit = min(limit, request.sink_window.num_tokens - 1)
        path = self.prefix_cache.path(request.token_ids, limit, request.cache_salt)
        num_known = cached.num_tokens // self.block_size
        stored = self.store.ask(request, path, num_known, limit)
        if not stored.parts:
            return cached._replace(stored=stored)
        num_tokens = cached.num_tokens + stored.num_tokens
        num_blocks = num_tokens // self.block_size
        rows = [*path, *([[GONE] * self.num_tables] * (num_blocks - len(path)))][:num_blocks]
        tables = [[*table] for table in zip(*rows, strict=True)]
        return self._shared(num_tokens, tables, request.sink_window)._replace(stored=stored)

    def why_no_more(self, request: Request, num_found: int, limit: int) -> MissReason:
        """Return the reason why ``match`` found no more of a request's first tokens."""
        if not request.params.cache_prompt:
            return MissReason.OFF
        sink_window, num_tokens = request.sink_window, len(request.token_ids)
        if sink_window is not None and num_found + self.block_size > sink_window.num_tokens < limit:
            return MissReason.SINK_WINDOW
        limit = min(limit, num_tokens if sink_window is None else sink_window.num_tokens)
        cache, salt = self.prefix_cache, request.cache_salt
        return cache.why_no_more(request.token_ids, num_found, limit, salt)

    def count_hit(self, request: Request) -> None:
        """Count that a request found the prefix that it has just been admitted with."""
        if request.num_published_blocks:
            last = request.block_ids[request.num_published_blocks - 1]
            if last in self.prefix_cache:
                self.prefix_cache.count_hit(last)

    def fork(self, source: Request, num_tokens: int) -> SharedPrefix:
        """Return the blocks of another request, for the same first ``num_tokens`` tokens. There are
        none if it gave some of them back, or if layers are recurrent: a state is that of all its
        tokens."""
        if self.states.exist:
            return self.nothing_shared
        end = self.blocks_for(num_tokens)
        tables = [table[:end] for table in source.block_tables]
        shared = self._shared(num_tokens, tables, source.sink_window)
        for gone, table in zip(
            self._left_behind(num_tokens, source.sink_window), tables, strict=True
        ):
            if table.count(GONE) > len(gone):
                return self.nothing_shared
        return shared

    def _shared(
        self,
        num_tokens: int,
        tables: list[list[int]],
        sink_window: SinkWindow | None,
        state: int = NO_STATE,
    ) -> SharedPrefix:
        """Leave out the blocks that no query after these tokens attends to."""
        for gone, table in zip(self._left_behind(num_tokens, sink_window), tables, strict=True):
            table[gone.start : gone.stop] = [GONE] * len(gone)
        return SharedPrefix(num_tokens, tables, state=state)

    def _left_behind(self, num_tokens: int, sink_window: SinkWindow | None) -> Iterator[range]:
        """Yield the blocks of each table that no query after so many tokens attends to."""
        for window in self.windows:
            if sink_window is not None:
                yield sink_window.left_behind(num_tokens, self.block_size)
            else:
                yield range(first_kept(window, num_tokens, self.block_size))

    def admit(
        self,
        request: Request,
        shared: SharedPrefix,
        num_tokens: int,
        headroom: int = 0,
        step_tokens: int | None = None,
    ) -> bool:
        """Give a request without blocks tables for its first ``num_tokens`` tokens.

        They begin with the shared blocks. ``headroom`` blocks must stay available::

            | shared.tables (reference count + 1)    | new blocks      |
            | shared.num_tokens              |  ...... num_tokens      |
                                             ^ writing starts here; where that is inside a
                                               shared block, the block is copied first

        The parts of ``shared.stored`` get new blocks: copies fill them, and they are published when
        the step with these copies has ended well.

        Layers with a window get blocks for the next ``step_tokens`` only, if that is given: they
        give some back before they need more. So do all layers of a request that has a sink window.
        """
        assert not request.block_ids and request.num_computed_tokens == 0
        of_windows = num_tokens
        if step_tokens is not None:
            of_windows = min(num_tokens, shared.num_tokens + step_tokens)
        has_room = self._has_room(request, shared, num_tokens, of_windows, headroom)
        if not has_room or not self.states.admit(request, shared.state):
            return False
        for block_id in chain(*shared.tables):
            if block_id != GONE:
                self._acquire(block_id)
        request.block_ids, *request.further_tables = map(list, shared.tables)
        request.num_computed_tokens = shared.num_tokens
        request.num_published_blocks = shared.num_tokens // self.block_size
        request.awaited_keys = ()
        if shared.stored.parts:
            self._restore(request, shared.stored)
        allocated = self._extend(request, num_tokens, of_windows)
        assert allocated
        return True

    def has_room(
        self, request: Request, shared: SharedPrefix, num_tokens: int, headroom: int
    ) -> bool:
        """Return whether a request can be admitted with all blocks of ``num_tokens`` tokens."""
        return self._has_room(request, shared, num_tokens, num_tokens, headroom)

    def _has_room(
        self,
        request: Request,
        shared: SharedPrefix,
        num_tokens: int,
        of_windows: int,
        headroom: int,
    ) -> bool:
        copied = shared.num_tokens % self.block_size != 0
        needed, idle = headroom + len(shared.stored.parts), 0
        for window, table in zip(self.windows, shared.tables, strict=True):
            end = self.blocks_for(num_tokens if _keeps_all(window, request) else of_windows)
            needed += end - len(table) + copied
            idle += sum(block_id != GONE and not self.ref_counts[block_id] for block_id in table)
        return needed <= len(self.free_blocks) - idle

    def _restore(self, request: Request, stored: Stored) -> None:
        """Plan copies of stored blocks to new blocks of a request."""
        sources = self.store.take(stored)  # before other blocks take their place
        targets = self._take(len(sources))
        for part, target in zip(stored.parts, targets, strict=True):
            request.block_tables[part.group][part.number] = target
        self._copies += zip(sources, targets, strict=True)
        first = min(part.number for part in stored.parts)
        # Where no group attends to all positions, there may be no block before the first.
        request.num_published_blocks = first if self.windows[0] is None else 0

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make the slots from the first uncomputed token up to ``num_tokens`` writable.

        Extends the tables, and copies blocks that are about to be written and are shared
        (copy-on-write). The copies are due before the next step: see ``take_copies``.
        """
        # No table is shorter than the last, and a block shared there is shared in all.
        table = request.further_tables[-1] if request.further_tables else request.block_ids
        first_unscheduled = request.num_computed_tokens + request.num_tokens_in_flight
        first_written = first_unscheduled // self.block_size
        if -(-num_tokens // self.block_size) <= len(table) and (  # a call less than blocks_for
            first_written >= len(table) or self.ref_counts[table[first_written]] < 2
        ):
            return True  # as for nearly every token of an answer
        return self._extend(request, num_tokens, num_tokens)

    def _extend(self, request: Request, num_tokens: int, of_windows: int) -> bool:
        """Do what ``allocate`` does, with another end for the tables of windows."""
        first_unscheduled = request.num_computed_tokens + request.num_tokens_in_flight
        first_written = first_unscheduled // self.block_size
        ends = self.blocks_for(num_tokens), self.blocks_for(of_windows)
        growing: list[tuple[list[int], int, bool]] = []
        needed = 0
        for window, table in zip(self.windows, request.block_tables, strict=True):
            count = max(0, ends[not _keeps_all(window, request)] - len(table))
            copied = first_written < len(table) and self.ref_counts[table[first_written]] > 1
            growing.append((table, count, copied))
            needed += count + copied
        if needed > len(self.free_blocks):
            return False
        for table, count, copied in growing:
            if copied:
                self._copy(table, first_written)
            table += self._take(count)
        return True

    def _copy(self, table: list[int], index: int) -> None:
        """Replace a shared block by a private copy."""
        (private,) = self._take(1)
        self._copies.append((table[index], private))
        self._release([table[index]])
        table[index] = private

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks of tables behind their first ``num_tokens`` tokens."""
        needed = self.blocks_for(num_tokens)
        for table in request.block_tables:
            self._release(reversed(table[needed:]))
            del table[needed:]

    def is_published(self, request: Request) -> bool:
        """Return whether all full blocks of a request are published; not while a step restores some
        from the store."""
        return request.num_published_blocks == request.num_computed_tokens // self.block_size

    def save_if_cached(self, block_id: int) -> tuple[tuple[int, int], ...]:
        """Return the copy of a block to the store, if the block is cached and the store lacks it.
        To be made before the next step, like those of ``take_copies``."""
        if block_id in self.prefix_cache:
            self._save(block_id)
        return self.take_copies()

    @property
    def has_due_copies(self) -> bool:
        """True if blocks are still to be copied before the next step."""
        return bool(self._copies)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the (source, destination) copies since the last call, to be made in this order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def commit(self, request: Request) -> None:
        """Publish blocks that became full and computed, and give back those that no window sees any
        more.

        Blocks of a request that takes no part in caches stay private. If the cache already holds a
        block's content, the request adopts that block and its own is released: one content, one
        block, and no request is left reading a block that is free.
        """
        size, first = self.block_size, request.num_published_blocks
        num_full = request.num_computed_tokens // size
        if num_full == first:  # as after nearly every token of an answer
            return
        end = num_full
        if request.sink_window is not None:  # later KV depends on the window: no other could use it
            end = min(end, request.sink_window.num_tokens // size)
        if request.params.cache_prompt:
            if first < end:
                self._publish(request, first, end)
            self.states.keep(request, request.block_ids[num_full - 1])
        request.num_published_blocks = num_full
        if self.has_windows or request.sink_window is not None:
            self._leave_behind(request)

    def _publish(self, request: Request, first: int, end: int) -> None:
        tables, token_ids, size = request.block_tables, request.token_ids, self.block_size
        starts = range(first * size, end * size, size)
        tokens = [tuple(token_ids[start : start + size]) for start in starts]
        own = [[table[index] for table in tables] for index in range(first, end)]
        parent = tables[0][first - 1] if first else None
        known = self.prefix_cache.publish(parent, tokens, own, request.cache_salt)
        for index, (mine, theirs) in enumerate(zip(own, known, strict=True), start=first):
            if mine != theirs:
                self._adopt(tables, index, theirs)

    def _adopt(self, tables: Iterable[list[int]], index: int, known: Sequence[int]) -> None:
        for table, block_id in zip(tables, known, strict=True):
            own = table[index]
            if block_id != own != GONE:
                self._acquire(block_id)
                self._release([own])
                table[index] = block_id

    def _leave_behind(self, request: Request) -> None:
        """Give back the blocks that no query from the first uncomputed token on attends to; queries
        of steps in flight come after it too."""
        behind = self._left_behind(request.num_computed_tokens, request.sink_window)
        for gone, table in zip(behind, request.block_tables, strict=True):
            for index in reversed(gone):
                if table[index] == GONE:
                    break
                self._release([table[index]])
                table[index] = GONE

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, tail first, so that leaves of the trie are evicted
        first."""
        for table in request.block_tables:
            self._release(block_id for block_id in reversed(table) if block_id != GONE)
        request.block_ids = []
        request.further_tables = []
        self.states.free(request)
        request.num_computed_tokens = 0
        request.num_published_blocks = 0

    # -- blocks by number --------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        next_to_go, ref_counts, cache = self.free_blocks.popitem, self.ref_counts, self.prefix_cache
        taken = []
        for _ in range(count):
            block_id, _ = next_to_go(last=False)
            if block_id in cache:
                self._save(block_id)
                self.states.drop(cache.forget(block_id))
                self.num_cached_blocks -= 1
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def _save(self, block_id: int) -> None:
        """Plan the copy of a published block to the store, before it is overwritten."""
        target = self.store.offer(block_id, self.prefix_cache.key_of, self.prefix_cache.key_before)
        if target is not None:
            self._copies.append((block_id, target))

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
        """Check every block. ``requests`` are all that may hold blocks. Takes time in proportion to
        the pool.

        Raises:
            EngineError: something is inconsistent; the message names all of it.
        """
        requests = list(requests)
        violations = [*self._violations(requests), *self.states.violations(requests)]
        if violations:
            raise EngineError(f"the block pool is damaged: {'; '.join(violations)}")

    def _violations(self, requests: Iterable[Request]) -> Iterator[str]:
        held = dict.fromkeys(self._ids, 0)
        for request in requests:
            yield from self._violations_of(request)
            for block_id in chain(*request.block_tables):
                if block_id != GONE:
                    held[block_id] = held.get(block_id, 0) + 1
        yield from self.store.violations()
        if held != {block_id: self.ref_counts[block_id] for block_id in self._ids}:
            yield "reference counts and block tables disagree"
        if {block for block, count in held.items() if count == 0} != set(self.free_blocks):
            yield "a held block is free, or a block is lost"
        num_cached = sum(block_id in self.prefix_cache for block_id in self.free_blocks)
        if num_cached != self.num_cached_blocks:
            yield f"{num_cached} blocks are cached, not {self.num_cached_blocks}"

    def _violations_of(self, request: Request) -> Iterator[str]:
        name, size = request.request_id, self.block_size
        behind = self._left_behind(request.num_computed_tokens, request.sink_window)
        for window, gone, table in zip(self.windows, behind, request.block_tables, strict=False):
            if request.num_computed_tokens > len(table) * size:
                yield f"{name} has computed more tokens than it has slots"
            if request.num_published_blocks > len(table):
                yield f"{name} has published more blocks than it has"
            if GONE in table[: gone.start] or GONE in table[gone.stop :]:
                yield f"{name} has given back what {request.sink_window or window} still sees"


def _keeps_all(window: int | None, request: Request) -> bool:
    """Return whether a table never gives a block back before its request ends."""
    return window is None and request.sink_window is None
