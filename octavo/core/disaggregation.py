"""Prompts apart from answers: which replicas compute what, and which prompts are worth it.

A prompt that is computed where others are answered makes each of these wait for a step with a part
of it. So prompts can have replicas of their own, which pass the KV on (Zhong et al., "DistServe";
Patel et al., "Splitwise"; both 2024)::

    prompt ─► a prefill replica ─► first token, KV ─► a decode replica ─► the rest of the answer
          └─ short, or mostly cached there ──────────────► a decode replica

One code for the server and for simulations: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from octavo.core.host_kv_cache import RestoreRule
from octavo.core.routing import Ask, ReplicaView

# Time of what is not the transfer itself: two more messages, and a turn in two more queues.
HAND_OVER_SECONDS = 0.005


class Role(Enum):
    """The work of a replica, by the name that operators see."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillRule(Protocol):
    """Says which prompts are computed apart from their answers."""

    def is_apart(self, num_tokens: int, num_cached: int) -> bool:
        """Return whether a prompt of so many tokens is, of which the replica that would answer it
        has ``num_cached``."""
        ...


class LongerThan:
    """A rule by the number of tokens that would have to be computed."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens

    def is_apart(self, num_tokens: int, num_cached: int) -> bool:
        return num_tokens - num_cached > self._num_tokens


class SlowerThanTransfer:
    """A rule by time: a prompt goes apart if computing it takes longer than passing its KV on.

    Args:
        restore: knows how long computing takes.
        token_seconds: of passing on the KV of a token.
    """

    def __init__(self, restore: RestoreRule, token_seconds: float):
        self._restore, self._token_seconds = restore, token_seconds

    def is_apart(self, num_tokens: int, num_cached: int) -> bool:
        seconds = HAND_OVER_SECONDS + num_tokens * self._token_seconds
        num_computed = max(1, num_tokens - num_cached)
        return self._restore.is_worth(num_tokens - num_computed, num_computed, seconds)


def goes_apart(ask: Ask, rule: PrefillRule, decode_replicas: Iterable[ReplicaView]) -> bool:
    """Return whether the prompt of a request is computed by a prefill replica: by what the decode
    replica that has most of it would have to compute."""
    num_cached = max((view.cached_tokens(ask.keys) for view in decode_replicas), default=0)
    return rule.is_apart(ask.num_tokens, num_cached)


class _Member(Protocol):
    @property
    def role(self) -> Role | None: ...
    @property
    def is_up(self) -> bool: ...


_R = TypeVar("_R", bound=_Member)


def able_to(role: Role | None, replicas: Sequence[_R]) -> list[_R]:
    """Return the replicas that are up and do the work of a role: if all of those that have it are
    down, any."""
    up = [replica for replica in replicas if replica.is_up]
    return [replica for replica in up if replica.role is role] or up
