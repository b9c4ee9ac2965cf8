"""The choice of replicas in a simulation: by the routers of a server's front, or by one that sees
the engines' caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.core.disaggregation import PrefillRule, goes_apart
from octavo.core.request import Request
from octavo.core.routing import ROUTERS, Ask, Router, TrackedReplica, router_named
from octavo.sim.replica import Replica

ORACLE = "prefix_oracle"


class Routing(Protocol):
    """Chooses a replica for each request, and is told what comes of it; by default the first one
    that is up."""

    def choose(self, request: Request, replicas: Sequence[Replica], num_coming: int = 0) -> Replica:
        """Return one of the replicas that are up, of which there is at least one. The request is
        then sent there. ``num_coming``: its tokens whose KV comes from another replica."""
        return replicas[0]

    def goes_apart(
        self, request: Request, rule: PrefillRule, decode_replicas: Sequence[Replica]
    ) -> bool:
        """Return whether the prompt of a request is not computed by those that would answer it."""
        return rule.is_apart(request.num_prompt_tokens, 0)

    def received(self, request: Request, num_tokens: int) -> None:
        """Note tokens of an answer."""
        return None

    def ended(self, request_id: str) -> None:
        """Note that a request is over, or is not there."""
        return None

    def failed(self, replica: Replica) -> None:
        """Note that a replica has lost its engine."""
        return None


class OneReplica(Routing):
    """Leaves nothing to choose."""


class FrontRouting(Routing):
    """Chooses as the front of a server does, by what it has sent and received.

    Args:
        tracked: what is known of the replicas, by name, for all routings of a front.
    """

    def __init__(self, router: Router, tracked: Mapping[str, TrackedReplica]):
        self._router = router
        self._tracked = tracked
        self._sent_to: dict[str, TrackedReplica] = {}  # by request

    def _ask(self, request: Request, block_size: int, num_coming: int = 0) -> Ask:
        tokens = request.prompt_token_ids
        if not self._router.uses_keys:
            return Ask(len(tokens), num_coming=num_coming)
        return replace(Ask.of(tokens, block_size), num_coming=num_coming)

    def goes_apart(
        self, request: Request, rule: PrefillRule, decode_replicas: Sequence[Replica]
    ) -> bool:
        views = [self._tracked[replica.name] for replica in decode_replicas]
        return goes_apart(self._ask(request, views[0].block_size), rule, views)

    def choose(self, request: Request, replicas: Sequence[Replica], num_coming: int = 0) -> Replica:
        up = [self._tracked[replica.name] for replica in replicas]
        ask = self._ask(request, up[0].block_size, num_coming)
        chosen = self._router.choose(ask, up)
        chosen.sent(request.request_id, ask)
        self._sent_to[request.request_id] = chosen
        return replicas[up.index(chosen)]

    def received(self, request: Request, num_tokens: int) -> None:
        tracked = self._sent_to.get(request.request_id)
        if tracked is not None:
            stats = request.stats
            tracked.began(request.request_id, stats.num_cached_tokens, stats.miss_reason)
            tracked.grew(request.request_id, num_tokens)

    def ended(self, request_id: str) -> None:
        tracked = self._sent_to.pop(request_id, None)
        if tracked is not None:
            tracked.ended(request_id)

    def failed(self, replica: Replica) -> None:
        if replica.name in self._tracked:
            self._tracked[replica.name].restarted()


class PrefixOracle(Routing):
    """Chooses the replica with the least work, as ``PrefixAware`` does, but sees the requests and
    the caches of all engines as they are, and knows no limit of the load. No front can."""

    def choose(self, request: Request, replicas: Sequence[Replica], num_coming: int = 0) -> Replica:
        return min(replicas, key=lambda replica: self._work(request, replica))

    def _work(self, request: Request, replica: Replica) -> tuple[int, int]:
        """Return the work in tokens, and the negative number of free blocks: of equals, the pool
        with most of these."""
        prompt = request.prompt_token_ids
        blocks = replica.engine.scheduler.block_manager
        num_cached = blocks.match(request, len(prompt) - 1).num_tokens
        waiting = held = 0
        for other in replica.requests.values():
            waiting += max(0, other.num_prompt_tokens - other.num_computed_tokens)
            held += other.num_computed_tokens
        return len(prompt) - num_cached + waiting + held, -blocks.num_free_blocks


def check_router(name: str) -> None:
    """Raise a ConfigError for a name that is no router's."""
    if name not in ROUTERS and name != ORACLE:
        raise ConfigError(f"{name!r} is no router: choose from {', '.join(ROUTERS)}, {ORACLE}")


def routings_named(name: str, replicas: Sequence[Replica], count: int = 1) -> list[Routing]:
    """Return what chooses among replicas that do the same work, by the name of its rule: for so
    many kinds of work."""
    if len(replicas) < 2:
        return [OneReplica()]
    if name == ORACLE:
        return [PrefixOracle() for _ in range(count)]
    tracked = {replica.name: _tracked(replica) for replica in replicas}
    return [FrontRouting(router_named(name), tracked) for _ in range(count)]


def _tracked(replica: Replica) -> TrackedReplica:
    cache = replica.spec.config.cache
    num_blocks = cache.num_blocks if cache.enable_prefix_caching else 0
    return TrackedReplica(replica.name, cache.block_size, num_blocks)
