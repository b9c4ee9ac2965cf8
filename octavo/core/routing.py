"""The choice of a replica for each request, and what a front remembers of its replicas.

One code for the server and for simulations: no I/O, no clock. A front knows what it sent and what
came back, and no more. It cannot see the prefix cache of an engine, but a block that it sent there
lately is probably still in it::

    front     router.choose(ask, replicas that are up) -> replica
              replica.sent       a request: its tokens wait, its blocks will be there
              replica.began      the first token has come, with the number of cached tokens
              replica.grew       more tokens have
              replica.ended

A view that is wrong costs time, never an answer: the engine computes what its cache lacks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeVar

from octavo.base.errors import ConfigError
from octavo.core.block_store import following_keys, root_key
from octavo.core.prefix_cache import MissReason

# Blocks of a prompt that have keys: a key takes half a microsecond, in the thread of the server.
MAX_KEYS = 4096
# A replica has no more requests than this many times the mean, and one.
MAX_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as a router is told of it.

    ``num_tokens``: of its prompt. ``keys``: of the first full blocks of that, as in
    ``block_store``, but the last block first; none for a request that takes no part in caches.
    ``num_coming``: tokens whose KV another replica passes on.
    """

    num_tokens: int
    keys: Sequence[bytes] = field(default=(), repr=False)
    num_coming: int = 0

    @classmethod
    def of(cls, token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> Ask:
        first = token_ids[: MAX_KEYS * block_size]
        keys = following_keys(root_key(cache_salt), first, block_size)
        return cls(len(token_ids), keys[::-1])


class ReplicaView(Protocol):
    """A replica as a front sees it. ``name`` is its own, and stays when it restarts."""

    @property
    def name(self) -> str: ...

    @property
    def num_requests(self) -> int:
        """Number of requests that were sent there and have not ended."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are still to be computed there."""
        ...

    @property
    def held_tokens(self) -> int:
        """Tokens of its requests whose KV is there, and read by every step of them."""
        ...

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Return the number of tokens at the start of a prompt whose KV is probably there, by
        ``Ask.keys``."""
        ...


_View = TypeVar("_View", bound=ReplicaView)


class Router(Protocol):
    """Chooses a replica for each request. ``uses_keys`` is false where ``Ask.keys`` need not be
    computed."""

    uses_keys: bool

    def choose(self, ask: Ask, replicas: Sequence[_View]) -> _View:
        """Return one of the replicas that are up, of which there is at least one."""
        ...


# -- rules ----------------------------------------------------------------------------------------


class RoundRobin(Router):
    """Chooses replicas in turn."""

    uses_keys = False

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, ask: Ask, replicas: Sequence[_View]) -> _View:
        self._turn = (self._turn + 1) % len(replicas)
        return replicas[self._turn]


class LeastLoaded(Router):
    """Chooses the replica with the fewest requests; equals in turn."""

    uses_keys = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, ask: Ask, replicas: Sequence[_View]) -> _View:
        counts = [replica.num_requests for replica in replicas]
        least = min(counts)
        turn = self._turn % len(counts)
        chosen = counts.index(least, turn) if least in counts[turn:] else counts.index(least)
        self._turn = chosen + 1
        return replicas[chosen]


class PrefixAware(Router):
    """Chooses the replica with the least work until the request is answered, of those that are not
    overloaded.

    The work is that of NVIDIA Dynamo's router: the prompt tokens that are still to be computed, the
    request's own that are not cached included, and the tokens whose KV every decoding step reads.
    The limit of the load is that of Mirrokni et al., "Consistent Hashing with Bounded Loads"
    (2018): what many requests share is soon in several replicas. Of equals, the first block of the
    prompt decides (rendezvous hashing), so that equal prompts meet even where nothing is known.
    """

    uses_keys = True

    def __init__(self) -> None:
        self._without_keys = LeastLoaded()

    def choose(self, ask: Ask, replicas: Sequence[_View]) -> _View:
        keys, total = ask.keys, 0
        for replica in replicas:
            total += replica.num_requests
        most = MAX_LOAD * (total + 1) / len(replicas)  # before it has one more
        least, equals = -1, list[_View]()
        for replica in replicas:
            if replica.num_requests <= most:
                work = replica.waiting_tokens + replica.held_tokens - replica.cached_tokens(keys)
                if not equals or work < least:
                    least, equals = work, [replica]
                elif work == least:
                    equals.append(replica)
        if len(equals) == 1:
            return equals[0]
        if not keys:
            return self._without_keys.choose(ask, equals)
        first = int.from_bytes(keys[-1][:8])
        return max(equals, key=lambda replica: _rendezvous(first, replica.name))


def _rendezvous(first: int, name: str) -> tuple[int, str]:
    """Return the weight of a replica for prompts that begin with a block."""
    return (first ^ _number_of(name)) * 0x9E3779B97F4A7C15 & (1 << 64) - 1, name


@lru_cache(maxsize=1024)
def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


def router_named(name: str) -> Router:
    """Return a new router; ConfigError for a name that is none of ``ROUTERS``."""
    if name not in ROUTERS:
        raise ConfigError(f"{name!r} is no router: choose from {', '.join(ROUTERS)}")
    return ROUTERS[name]()


# -- what a front remembers -----------------------------------------------------------------------


@dataclass(slots=True)
class _Sent:
    """A request that has not ended.

    ``last_uses``: of the blocks that were thought to be cached when it was sent, the last first:
    when they had been used before.
    """

    last_uses: list[int]
    num_waiting: int
    num_held: int


class TrackedReplica:
    """One replica as a front remembers it: its requests, and the blocks that were sent there.

    Blocks are remembered as the engine's cache keeps them: the least recently used are forgotten
    first, and of a prompt the last ones, so that all before a known block are known. An event costs
    O(1), but O(blocks of the prompt) where a request is sent. Events of requests that it does not
    have, since it restarted meanwhile, have no effect.

    Args:
        max_blocks: the most blocks that its engine can keep; 0 if it caches nothing.
    """

    __slots__ = ("_known", "_max_blocks", "_num_sent", "_requests", "block_size", "held_tokens",
                 "name", "num_requests", "waiting_tokens")  # fmt: skip

    def __init__(self, name: str, block_size: int, max_blocks: int):
        self.name = name
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._num_sent = 0
        self.restarted()

    def restarted(self) -> None:
        """Forget everything: its engine has ended, and a new one knows nothing."""
        self.num_requests = 0
        self.waiting_tokens = 0
        self.held_tokens = 0
        self._requests: dict[str, _Sent] = {}
        # When each block was last used, as a number of a request; the least recently used first.
        self._known: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_known_blocks(self) -> int:
        return len(self._known)

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        if not keys or keys[-1] not in self._known:
            return 0
        num_unknown = bisect_left(keys, True, key=self._known.__contains__)
        return (len(keys) - num_unknown) * self.block_size

    def sent(self, request_id: str, ask: Ask) -> None:
        """Note a request that is sent there."""
        keys, known = ask.keys, self._known
        num_cached = self.cached_tokens(keys)
        last_uses = [known[key] for key in keys[len(keys) - num_cached // self.block_size :]]
        # The last token is always computed.
        num_cached = min(max(num_cached, ask.num_coming), ask.num_tokens - 1)
        self._num_sent += 1
        for key in keys:
            known[key] = self._num_sent
            known.move_to_end(key)
        for _ in range(len(known) - self._max_blocks):
            known.popitem(last=False)
        num_waiting = ask.num_tokens - num_cached
        self._requests[request_id] = _Sent(last_uses, num_waiting, num_cached)
        self.num_requests += 1
        self.waiting_tokens += num_waiting
        self.held_tokens += num_cached

    def began(self, request_id: str, cached_tokens: int, miss_reason: str = "") -> None:
        """Note a first token: the prompt is computed, and of it ``cached_tokens`` had been cached
        before.

        Blocks that were used before the first one that had been evicted (by ``miss_reason``) are
        forgotten. Other reasons say nothing of them. Without effect where it was noted before.
        """
        sent = self._requests.get(request_id)
        if sent is None or not sent.num_waiting:
            return
        self.waiting_tokens -= sent.num_waiting
        self._hold(sent, sent.num_waiting)
        sent.num_waiting = 0
        num_evicted = len(sent.last_uses) - cached_tokens // self.block_size
        if miss_reason == MissReason.EVICTED.value and num_evicted > 0:
            self._forget(sent.last_uses[num_evicted - 1])
        sent.last_uses = []

    def grew(self, request_id: str, num_tokens: int) -> None:
        """Note more tokens of an answer."""
        sent = self._requests.get(request_id)
        if sent is not None:
            self._hold(sent, num_tokens)

    def ended(self, request_id: str) -> None:
        """Note the end of a request, whatever it was."""
        sent = self._requests.pop(request_id, None)
        if sent is not None:
            self.num_requests -= 1
            self.waiting_tokens -= sent.num_waiting
            self.held_tokens -= sent.num_held

    def _hold(self, sent: _Sent, num_tokens: int) -> None:
        sent.num_held += num_tokens
        self.held_tokens += num_tokens

    def _forget(self, number: int) -> None:
        """Forget the blocks that were not used since a request of that number."""
        known = self._known
        while known and next(iter(known.values())) <= number:
            known.popitem(last=False)
