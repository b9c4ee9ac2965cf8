"""KV pools of ranks that attend to sequences of their own, and the choice of the rank for each.

    blocks   0 ... B - 1   B ... 2 B - 1   ...
    of       rank 0        rank 1

Every rank of a tensor-parallel group has a whole KV pool, with a prefix cache of its own. All
blocks of a request are in one pool, from its admission until it ends or is preempted; then it may
go to another one. A prefix that is cached in another pool is a miss: KV does not go from rank to rank.

A request goes where the sum of two numbers of tokens is least: those of its own that are not cached
there, and those that lie in the used blocks of the pool (Dynamo's rule for replicas, as of
``routing.py``). Only where no pool has room for it, room does not matter. A sample of a prompt that
another one has computed goes to that one, if there is room.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

from octavo.base.errors import EngineError
from octavo.core.batch import ScheduledRequest
from octavo.core.block_manager import BlockManager, SharedPrefix
from octavo.core.block_store import BlockStore
from octavo.core.kv_tables import Windows
from octavo.core.prefix_cache import MissReason, NoPrefixCache, PrefixCache
from octavo.core.prefix_parts import PrefixPart, TrieNode, largest_parts
from octavo.core.request import Request, RequestStatus
from octavo.core.state_slots import States


class BlockPools:
    """Block managers of equal pools, as one block manager; see there.

    Args:
        num_blocks: of all pools together.
        make_cache: makes the prefix cache of a pool.
    """

    def __init__(
        self,
        num_pools: int,
        num_blocks: int,
        block_size: int,
        make_cache: Callable[[], PrefixCache] = NoPrefixCache,
    ):
        assert num_blocks % num_pools == 0
        each = num_blocks // num_pools
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = [0] * num_blocks
        self.pools = [
            BlockManager(
                *(each, block_size, make_cache()),
                first_block=index * each,
                ref_counts=self.ref_counts,
            )
            for index in range(num_pools)
        ]
        self.prefix_cache: PrefixCache = _AllCaches([pool.prefix_cache for pool in self.pools])
        self.free_blocks = ChainMap(*(pool.free_blocks for pool in self.pools))
        one = self.pools[0]
        self.windows: Windows = one.windows
        self.num_tables, self.has_windows = one.num_tables, one.has_windows
        self.nothing_shared = one.nothing_shared
        self.store: BlockStore = one.store
        self.states: States = one.states

    # -- counts ------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        return sum(pool.num_available_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        return sum(pool.num_free_blocks for pool in self.pools)

    @property
    def num_cached_blocks(self) -> int:
        return sum(pool.num_cached_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        return sum(pool.num_used_blocks for pool in self.pools)

    def longest_sequence(self, step_tokens: int, limit: int) -> int:
        return self.pools[0].longest_sequence(step_tokens, limit)

    def waste(self, requests: Iterable[Request]) -> float:
        """See ``BlockManager``: of all pools together."""
        used = self.num_used_blocks
        empty = sum(
            pool.waste(own) * pool.num_used_blocks
            for pool, own in zip(self.pools, self._by_pool(requests), strict=True)
        )
        return empty / used if used else 0.0

    # -- pools of requests -------------------------------------------------------------------

    def place(self, request: Request) -> None:
        """Choose the pool of a request that is to be admitted."""
        needed = self.pools[0].blocks_for(len(request.token_ids))
        source = request.fork_of
        if source is not None and source.status is RequestStatus.RUNNING:
            shared = source.num_computed_tokens // self.block_size
            if self.pools[source.pool].num_available_blocks >= needed - shared:
                request.pool = source.pool
                return
        limit = len(request.token_ids) - 1
        cached = [pool.match(request, limit).num_tokens for pool in self.pools]

        def cost(index: int) -> tuple[bool, int, int]:
            pool, num_cached = self.pools[index], cached[index]
            is_full = pool.num_available_blocks < needed - num_cached // self.block_size
            held = pool.num_used_blocks * self.block_size
            return is_full, held - num_cached, index

        request.pool = min(range(len(self.pools)), key=cost)

    def headroom(self, request: Request, running: Collection[Request]) -> int:
        return len(self.rivals(request, list(running))) * self.num_tables

    def rivals(self, request: Request, others: list[Request]) -> list[Request]:
        pool = request.pool
        return [other for other in others if other.pool == pool]

    def in_order(self, items: Collection[ScheduledRequest]) -> Collection[ScheduledRequest]:
        return sorted(items, key=lambda item: item.request.pool)

    def _of(self, request: Request) -> BlockManager:
        return self.pools[request.pool]

    def _by_pool(self, requests: Iterable[Request]) -> list[list[Request]]:
        own: list[list[Request]] = [[] for _ in self.pools]
        for request in requests:
            own[request.pool].append(request)
        return own

    # -- blocks of a request, by the manager of its pool --------------------------------------

    def match(self, request: Request, limit: int) -> SharedPrefix:
        return self._of(request).match(request, limit)

    def why_no_more(self, request: Request, num_found: int, limit: int) -> MissReason:
        return self._of(request).why_no_more(request, num_found, limit)

    def count_hit(self, request: Request) -> None:
        self._of(request).count_hit(request)

    def fork(self, source: Request, num_tokens: int) -> SharedPrefix:
        return self._of(source).fork(source, num_tokens)

    def admit(
        self,
        request: Request,
        shared: SharedPrefix,
        num_tokens: int,
        headroom: int = 0,
        step_tokens: int | None = None,
    ) -> bool:
        return self._of(request).admit(request, shared, num_tokens, headroom, step_tokens)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        return self._of(request).allocate(request, num_tokens)

    def trim(self, request: Request, num_tokens: int) -> None:
        self._of(request).trim(request, num_tokens)

    def is_published(self, request: Request) -> bool:
        return self._of(request).is_published(request)

    def commit(self, request: Request) -> None:
        self._of(request).commit(request)

    def free(self, request: Request) -> None:
        self._of(request).free(request)

    # -- copies ------------------------------------------------------------------------------

    def save_if_cached(self, block_id: int) -> tuple[tuple[int, int], ...]:
        return ()  # there is no store

    @property
    def has_due_copies(self) -> bool:
        return any(pool.has_due_copies for pool in self.pools)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        return tuple(chain.from_iterable(pool.take_copies() for pool in self.pools))

    # -- audit -------------------------------------------------------------------------------

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """See ``BlockManager``.

        Raises:
            EngineError: a pool is inconsistent; the message says which one.
        """
        for index, (pool, own) in enumerate(zip(self.pools, self._by_pool(requests), strict=True)):
            try:
                pool.check_integrity(own)
            except EngineError as error:
                raise EngineError(f"pool {index}: {error}") from error


Blocks: TypeAlias = BlockManager | BlockPools


class _AllCaches(PrefixCache):
    """The prefix caches of all pools, to look at."""

    def __init__(self, caches: Sequence[PrefixCache]):
        self._caches = caches

    def __contains__(self, block_id: int) -> bool:
        return any(block_id in cache for cache in self._caches)

    @property
    def roots(self) -> Iterable[TrieNode]:
        return chain.from_iterable(cache.roots for cache in self._caches)

    def largest_parts(self, most: int) -> list[PrefixPart]:
        return largest_parts(self.roots, most)
