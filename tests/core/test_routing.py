"""The choice of replicas, and what a front remembers of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.base.errors import ConfigError
from octavo.core.block_store import keys_of, next_key, root_key
from octavo.core.request import Request
from octavo.core.routing import (
    MAX_KEYS,
    MAX_LOAD,
    ROUTERS,
    Ask,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    TrackedReplica,
    router_named,
)
from octavo.core.sampling_params import SamplingParams

SIZE = 4


def replicas(num: int, max_blocks: int = 1000) -> list[TrackedReplica]:
    return [TrackedReplica(f"replica {i}", SIZE, max_blocks) for i in range(num)]


def prompt(kind: int, length: int, own: int = 0) -> list[int]:
    """``length`` tokens of a kind that others share, and some of its own."""
    return [1000 * kind + i for i in range(length)] + [-1 - kind * 100 - i for i in range(own)]


def ask(kind: int, length: int, own: int = 0) -> Ask:
    return Ask.of(prompt(kind, length, own), SIZE)


# -- what is asked --------------------------------------------------------------------------------


def test_keys_are_those_of_the_engine():
    tokens = prompt(1, 11)
    request = Request("r", tokens, SamplingParams(), 0.0, cache_salt="k")
    asked = Ask.of(tokens, SIZE, "k")
    assert asked.num_tokens == 11
    assert [*reversed(asked.keys)] == keys_of(request, 2, SIZE)
    assert asked.keys[-1] == next_key(root_key("k"), tokens[:SIZE])
    assert not set(asked.keys) & set(Ask.of(tokens, SIZE, "another").keys)


def test_a_long_prompt_has_a_bounded_number_of_keys():
    asked = Ask.of(range((MAX_KEYS + 5) * SIZE), SIZE)
    assert len(asked.keys) == MAX_KEYS and asked.num_tokens == (MAX_KEYS + 5) * SIZE


# -- rules ----------------------------------------------------------------------------------------


def test_round_robin_takes_turns_whatever_is_up():
    router, three = RoundRobin(), replicas(3)
    assert [router.choose(Ask(1), three).name[-1] for _ in range(4)] == ["0", "1", "2", "0"]
    assert router.choose(Ask(1), three[:1]) is three[0]


def test_least_loaded_takes_equals_in_turn():
    router, three = LeastLoaded(), replicas(3)
    assert [router.choose(Ask(1), three).name[-1] for _ in range(4)] == ["0", "1", "2", "0"]
    three[0].sent("a", Ask(1))
    three[2].sent("b", Ask(1))
    assert {router.choose(Ask(1), three).name for _ in range(3)} == {"replica 1"}
    three[1].sent("c", Ask(1))
    three[1].sent("d", Ask(1))
    assert {router.choose(Ask(1), three).name[-1] for _ in range(2)} == {"0", "2"}


def test_prefix_aware_goes_where_the_prefix_is_until_that_is_overloaded():
    router, four = PrefixAware(), replicas(4)
    home = router.choose(ask(1, 4000), four)
    home.sent("first", ask(1, 4000))
    home.began("first", 0)
    home.ended("first")
    for number in range(30):
        chosen = router.choose(ask(1, 4000, own=10), four)
        total = sum(each.num_requests for each in four) + 1
        assert chosen.num_requests + 1 <= MAX_LOAD * total / 4 + 1
        if number == 0:
            assert chosen is home
        chosen.sent(str(number), ask(1, 4000, own=10))
    assert max(each.num_requests for each in four) <= MAX_LOAD * 30 / 4 + 1


def test_prefix_aware_weighs_waiting_and_held_tokens_against_cached_ones():
    router, (one, other) = PrefixAware(), replicas(2)
    one.sent("a", ask(1, 100))
    one.began("a", 0)
    other.sent("b", ask(2, 40))  # so that neither is overloaded
    assert router.choose(ask(3, 40), [one, other]) is other  # 40 tokens wait there, 100 are held
    assert router.choose(ask(1, 100, own=8), [one, other]) is one  # 8 + 100, not 108 + 40
    other.ended("b")
    other.sent("c", ask(2, 4))
    one.grew("a", 10)
    assert router.choose(ask(1, 100, own=8), [one, other]) is other  # 8 + 110, or 108 + 4


def test_equal_prefixes_meet_where_nothing_is_known():
    many = replicas(8)
    firsts = Counter()
    for kind in range(400):
        chosen = {PrefixAware().choose(ask(kind, 40, own), many).name for own in (0, 1, 9)}
        assert len(chosen) == 1
        # One replica less changes the choice of its own prefixes alone.
        rest = [each for each in many if each.name != "replica 5"]
        if chosen != {"replica 5"}:
            assert {PrefixAware().choose(ask(kind, 40), rest[::-1]).name} == chosen
        firsts.update(chosen)
    assert len(firsts) == 8 and max(firsts.values()) < 2 * 400 / 8


def test_prompts_without_a_full_block_are_spread():
    router, many = PrefixAware(), replicas(4)
    for number in range(8):
        router.choose(Ask.of([7], SIZE), many).sent(str(number), Ask(1))
    assert [each.num_requests for each in many] == [2, 2, 2, 2]


def test_routers_by_name():
    assert {name: type(router_named(name)) for name in ROUTERS} == ROUTERS
    with pytest.raises(ConfigError, match=r"'random' is no router: choose from round_robin, "):
        router_named("random")


@dataclass
class CountingKeys:
    """A sequence that counts how often it is read."""

    keys: list[bytes]
    num_reads: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index):
        self.num_reads += 1
        return self.keys[index]


@pytest.mark.parametrize("num_known", [0, 1, 100, 256])
def test_routing_reads_few_keys_of_each_replica(num_known):
    many = replicas(64)
    keys = ask(1, 256 * SIZE).keys
    for each in many:
        each.sent("a", Ask(num_known * SIZE + 1, keys[256 - num_known :]))
    counting = CountingKeys(keys)
    PrefixAware().choose(Ask(256 * SIZE, counting), many)
    assert counting.num_reads <= 64 * (2 + math.ceil(math.log2(257))) + 1
    if not num_known:
        assert counting.num_reads <= 64 + 1


# -- what is remembered ---------------------------------------------------------------------------


def test_counts_follow_a_request():
    (one,) = replicas(1)
    one.sent("a", ask(1, 100))
    assert (one.num_requests, one.waiting_tokens, one.held_tokens) == (1, 100, 0)
    one.sent("b", ask(1, 100))  # all is known; the last token is computed
    assert (one.num_requests, one.waiting_tokens, one.held_tokens) == (2, 101, 99)
    one.began("b", 99)
    one.grew("b", 3)
    one.began("b", 99)  # is known
    assert (one.num_requests, one.waiting_tokens, one.held_tokens) == (2, 100, 103)
    one.ended("b")
    one.ended("a")
    assert (one.num_requests, one.waiting_tokens, one.held_tokens) == (0, 0, 0)
    for late in (lambda: one.began("a", 0), lambda: one.grew("a", 1), lambda: one.ended("a")):
        late()
        assert (one.num_requests, one.waiting_tokens, one.held_tokens) == (0, 0, 0)


def test_a_restart_forgets_everything():
    (one,) = replicas(1)
    one.sent("a", ask(1, 100))
    one.restarted()
    assert (one.num_requests, one.waiting_tokens, one.num_known_blocks) == (0, 0, 0)
    one.ended("a")
    assert one.num_known_blocks == 0 and one.num_requests == 0


def test_blocks_are_bounded_and_the_least_recently_used_go_first_from_the_end():
    (one,) = replicas(1, max_blocks=12)
    for kind in (1, 2):
        one.sent(str(kind), ask(kind, 5 * SIZE))
    one.sent("3", ask(3, 4 * SIZE))
    assert one.num_known_blocks == 12
    assert [one.cached_tokens(ask(kind, 20).keys) for kind in (1, 2, 3)] == [12, 20, 16]
    one.sent("4", ask(4, 99 * SIZE))
    assert one.cached_tokens(ask(4, 99 * SIZE).keys) == 12 * SIZE


def test_an_eviction_that_is_reported_shows_what_else_has_gone():
    (one,) = replicas(1)
    for kind in range(5):
        one.sent(str(kind), ask(kind, 5 * SIZE))
        one.began(str(kind), 0, "never_seen")
        one.ended(str(kind))
    one.sent("again", ask(2, 5 * SIZE, own=8))
    one.began("again", 2 * SIZE, "evicted")
    found = [one.cached_tokens(ask(kind, 5 * SIZE).keys) // SIZE for kind in range(5)]
    assert found == [0, 0, 5, 5, 5]  # what was sent again has been computed


@pytest.mark.parametrize("reason", ["never_seen", "no_state", "left_behind", "block_border"])
def test_other_misses_show_nothing(reason):
    (one,) = replicas(1)
    for kind in range(3):
        one.sent(str(kind), ask(kind, 5 * SIZE))
    one.sent("again", ask(1, 5 * SIZE))  # together with the first, which is not computed yet
    one.began("again", 0, reason)
    assert [one.cached_tokens(ask(kind, 5 * SIZE).keys) for kind in range(3)] == [5 * SIZE] * 3


@dataclass
class SlowRequest:
    keys: list[bytes]  # the first block's first
    num_tokens: int
    num_held: int  # those that were cached, and what comes of it
    before: dict[bytes, int] = field(default_factory=dict)
    has_begun: bool = False
    num_grown: int = 0


class SlowReplica:
    """Twin of a ``TrackedReplica`` that searches and adds up everything, and keeps no order."""

    def __init__(self, max_blocks: int):
        self.max_blocks = max_blocks
        self.uses: dict[bytes, tuple[int, int]] = {}  # number of the request, and moment
        self.requests: dict[str, SlowRequest] = {}
        self.number = self.moment = 0

    def cached(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.uses), len(keys))

    def sent(self, name: str, keys: list[bytes], num_tokens: int) -> None:
        num_cached = self.cached(keys)
        before = {key: self.uses[key][0] for key in keys[:num_cached]}
        self.requests[name] = SlowRequest(
            keys, num_tokens, min(num_cached * SIZE, num_tokens - 1), before
        )
        self.number += 1
        for key in reversed(keys):
            self.moment += 1
            self.uses[key] = (self.number, self.moment)
        latest = sorted(self.uses, key=lambda key: self.uses[key][1], reverse=True)
        self.uses = {key: self.uses[key] for key in latest[: self.max_blocks]}

    def began(self, name: str, num_cached: int, is_evicted: bool) -> None:
        request = self.requests[name]
        request.has_begun = True
        first = request.keys[num_cached // SIZE : num_cached // SIZE + 1]
        if is_evicted and first and first[0] in request.before:
            oldest = request.before[first[0]]
            self.uses = {key: use for key, use in self.uses.items() if use[0] > oldest}


class TrackedMachine(RuleBasedStateMachine):
    """Sends events in any order to a ``TrackedReplica`` and to its slow twin."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.slow = TrackedReplica("replica 0", SIZE, 9), SlowReplica(9)
        self.num_sent = 0

    @rule(parts=st.lists(st.integers(0, 2), max_size=12), rest=st.integers(1, SIZE))
    def send(self, parts, rest):
        self.num_sent += 1
        tokens = [part for part in parts for _ in range(SIZE)] + [9] * rest
        asked = Ask.of(tokens, SIZE)
        self.real.sent(str(self.num_sent), asked)
        self.slow.sent(str(self.num_sent), [*reversed(asked.keys)], len(tokens))

    @rule(data=st.data(), blocks=st.integers(0, 12), reason=st.sampled_from(["evicted", "off"]))
    def begin(self, data, blocks, reason):
        waiting = [name for name, each in self.slow.requests.items() if not each.has_begun]
        if waiting:
            name = data.draw(st.sampled_from(waiting))
            self.real.began(name, blocks * SIZE, reason)
            self.slow.began(name, blocks * SIZE, reason == "evicted")

    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def grow(self, data, num_tokens):
        begun = [name for name, each in self.slow.requests.items() if each.has_begun]
        if begun:
            name = data.draw(st.sampled_from(begun))
            self.real.grew(name, num_tokens)
            self.slow.requests[name].num_grown += num_tokens

    @rule(data=st.data())
    def end(self, data):
        if self.slow.requests:
            name = data.draw(st.sampled_from([*self.slow.requests]))
            self.real.ended(name)
            del self.slow.requests[name]

    @rule()
    def restart(self):
        self.real.restarted()
        number = self.slow.number
        self.slow = SlowReplica(9)
        self.slow.number = number

    @invariant()
    def they_agree(self):
        requests = self.slow.requests.values()
        assert self.real.num_requests == len(requests)
        begun = [each for each in requests if each.has_begun]
        waiting = [each for each in requests if not each.has_begun]
        assert self.real.waiting_tokens == sum(each.num_tokens - each.num_held for each in waiting)
        assert self.real.held_tokens == sum(each.num_held for each in waiting) + sum(
            each.num_tokens + each.num_grown for each in begun
        )
        assert self.real.num_known_blocks == len(self.slow.uses) <= 9
        for each in requests:
            keys = each.keys
            assert self.real.cached_tokens(keys[::-1]) == self.slow.cached(keys) * SIZE
            known = [key in self.slow.uses for key in keys]
            assert all(before or not after for before, after in pairwise(known))


TestTrackedReplica = TrackedMachine.TestCase
TestTrackedReplica.settings = settings(max_examples=60, stateful_step_count=40)
