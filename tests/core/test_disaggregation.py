"""Which prompts are computed apart from their answers, and by which replicas."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from octavo.core.disaggregation import (
    HAND_OVER_SECONDS,
    LongerThan,
    Role,
    SlowerThanTransfer,
    able_to,
    goes_apart,
)
from octavo.core.routing import Ask, TrackedReplica


@dataclass
class Member:
    role: Role | None
    is_up: bool = True


class OneMillisecond:
    """A restore rule where each token takes a millisecond."""

    def is_worth(self, start, num_tokens, seconds):
        return seconds < num_tokens * 1e-3


def test_others_do_the_work_of_a_role_that_is_down():
    prefill, decode = Member(Role.PREFILL), Member(Role.DECODE)
    members = [prefill, decode]
    assert able_to(Role.PREFILL, members) == [prefill]
    assert able_to(Role.DECODE, members) == [decode]
    prefill.is_up = False
    assert able_to(Role.PREFILL, members) == able_to(Role.DECODE, members) == [decode]
    decode.is_up = False
    assert able_to(Role.PREFILL, members) == []


def test_without_roles_all_do_all():
    members = [Member(None), Member(None, is_up=False), Member(None)]
    assert able_to(None, members) == [members[0], members[2]]


def test_what_is_cached_where_it_would_be_answered_counts_as_short():
    rule, prompt = LongerThan(20), list(range(100))
    views = [TrackedReplica(name, 16, 100) for name in ("a", "b")]
    ask = Ask.of(prompt, 16)
    assert goes_apart(ask, rule, views) and goes_apart(ask, rule, [])
    views[1].sent("x", Ask.of(prompt[:90], 16))
    assert not goes_apart(ask, rule, views)
    assert goes_apart(Ask.of(prompt * 2, 16), rule, views)


def test_a_prompt_stays_where_its_kv_would_take_longer_to_come():
    rule = SlowerThanTransfer(OneMillisecond(), 0.25e-3)
    at_least = HAND_OVER_SECONDS / 0.75e-3
    assert not rule.is_apart(int(at_least), 0) and rule.is_apart(int(at_least) + 1, 0)
    assert not rule.is_apart(1000, 900)  # all of it would have to come
    assert not rule.is_apart(10, 10)
    assert not SlowerThanTransfer(OneMillisecond(), 2e-3).is_apart(10**6, 0)


@pytest.mark.parametrize("num_coming, num_waiting", [(0, 100), (90, 10), (100, 1)])
def test_what_comes_from_another_replica_is_no_work(num_coming, num_waiting):
    view = TrackedReplica("a", 16, 100)
    view.sent("x", Ask(100, num_coming=num_coming))
    assert view.waiting_tokens == num_waiting and view.held_tokens == 100 - num_waiting
    view.ended("x")
    assert view.waiting_tokens == view.held_tokens == 0
