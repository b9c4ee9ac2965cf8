"""KV pools of ranks that attend to sequences of their own, and the choice of the rank for each.

    blocks   0 ... B - 1   B ... 2 B - 1   ...
    of       rank 0        rank 1

Every rank of a tensor-parallel group has a whole KV pool, with a prefix cache of its own. All
blocks of a request are in one pool, from its admission until it ends or is preempted; then it may
go to another one. A prefix that is cached in another pool is a miss: KV is not copied from rank to
rank.

A request goes, of the pools that have room for it, to the one that has most of its tokens cached,
or that holds the fewest blocks. None is chosen that would have more than 1.25 times the mean number
of requests, and one (as of replicas: ``routing.py``), but for a sample of a prompt that is already
there. So what many ask for is soon in several caches, and no rank attends to much more than others,
which wait for it in each layer.
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
from octavo.core.routing import MAX_LOAD
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

    def place(
        self,
        request: Request,
        running: Collection[Request],
        shared_of: Callable[[Request], SharedPrefix],
    ) -> SharedPrefix:
        """Choose the pool of a request that is to be admitted, and return what it shares there;
        see above for the rule."""
        counts = [len(own) for own in self._by_pool(running)]
        most = MAX_LOAD * (len(running) + 1) / len(self.pools) + 1
        source = request.fork_of
        is_sample = source is not None and source.status is RequestStatus.RUNNING
        found: list[SharedPrefix] = []

        def cost(index: int) -> tuple[bool, bool, int, int]:
            request.pool, pool = index, self.pools[index]
            found.append(shared := shared_of(request))
            num_tokens, headroom = len(request.token_ids), counts[index] * self.num_tables
            is_full = not pool.has_room(request, shared, num_tokens, headroom)
            has_most = counts[index] + 1 > most and not (
                is_sample and source is not None and source.pool == index
            )
            return is_full, has_most, -shared.num_tokens, pool.num_used_blocks

        request.pool = min(range(len(self.pools)), key=cost)
        return found[request.pool]

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
