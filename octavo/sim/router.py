"""Rules that choose the replica of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.core.request import Request
from octavo.sim.replica import Replica


class Router(Protocol):
    """Chooses a replica for each request, among the one or more that are up."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica: ...


class RoundRobin:
    """Chooses replicas in turn."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._numbers) % len(replicas)]


class LeastLoaded:
    """Chooses the replica with the fewest requests, running and waiting; of equals the first."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: len(replica.requests))


class PrefixAware:
    """Chooses the replica with the least work until the request is answered, cached prompt tokens
    deducted.

    The rule is that of NVIDIA Dynamo's router: prompt tokens that are still to be computed, the
    request's own included, and tokens whose KV is held, which every decoding step reads. It sees
    the caches as they are, as a router does that is told of every change.
    """

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
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
