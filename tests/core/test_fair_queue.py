"""Fair shares of tenants in virtual time: a step is the unit, and nothing reads a clock."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.fair_queue import FairQueue, behind
from octavo.core.request import Request, RequestStatus
from octavo.core.sampling_params import SamplingParams


def waiting(name: str, tenant: str = "", key: int = 0, prompt: int = 1, weight: float = 1.0):
    request = Request(name, [1] * prompt, SamplingParams(), 0.0, tenant=tenant, weight=weight)
    request.queue_key = (key, int(name[1:]))
    return request


def admitted(queue: FairQueue, most: int = 1000, passed=()) -> list[str]:
    """One round, in which all join but those that are passed over."""
    names: list[str] = []
    for request in queue.in_order():
        if request.request_id in passed:
            continue
        if len(names) == most:
            break
        queue.admit(request, len(request.token_ids))
        names.append(request.request_id)
    return names


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30), st.randoms())
def test_one_tenant_alone_has_the_order_of_its_keys(asked, rng):
    queue, there = FairQueue(), []
    for number, (key, joins) in enumerate(asked):
        request = waiting(f"r{number}", "me", key)
        queue.add(request)
        there.append(request)
        if joins:
            there.sort(key=lambda each: each.queue_key)
            passed = {each.request_id for each in there if rng.random() < 0.3}
            expected = [each for each in there if each.request_id not in passed][:2]
            assert admitted(queue, 2, passed) == [each.request_id for each in expected]
            there = [each for each in there if each not in expected]
            queue.charge(request, rng.randrange(100))
        assert len(queue) == len(there)
        assert queue.num_tokens == len(there)


def test_places_go_to_whoever_was_given_the_fewest_tokens():
    queue = FairQueue()
    for number in range(4):
        queue.add(waiting(f"a{number}", "a", number, prompt=10))
    for number in range(6):
        queue.add(waiting(f"b{number}", "b", number, prompt=4))
    assert admitted(queue) == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "a2", "b5", "a3"]


def test_answers_count_as_they_come_and_idle_tenants_save_nothing():
    queue = FairQueue()
    for number in range(4):
        queue.add(waiting(f"a{number}", "a", number))
    assert admitted(queue, 1) == ["a0"]
    queue.charge(waiting("a0", "a"), 100)
    queue.add(waiting("b0", "b", 9))  # it was not there for those 100, and is not owed them
    queue.add(waiting("b1", "b", 9))
    assert admitted(queue, 2) == ["a1", "b0"]
    queue.charge(waiting("b0", "b"), 5)
    assert admitted(queue) == ["a2", "a3", "b1"]


def test_what_nobody_else_wanted_is_owed_to_nobody():
    queue = FairQueue()
    queue.add(waiting("a0", "a"))
    assert admitted(queue) == ["a0"]
    queue.charge(waiting("a0", "a"), 1000)  # nobody waits
    queue.add(waiting("a1", "a", 1))
    queue.add(waiting("b1", "b", 2))
    assert admitted(queue) == ["a1", "b1"]


def test_a_pause_is_no_way_out_of_a_debt():
    queue = FairQueue()
    queue.add(waiting("a0", "a", 0, prompt=50))
    for number in range(5):
        queue.add(waiting(f"b{number}", "b", number, prompt=10))
    assert admitted(queue, 2) == ["a0", "b0"]
    queue.add(waiting("a1", "a", 9))
    assert admitted(queue) == ["b1", "b2", "b3", "b4", "a1"]


def test_weights_are_shares():
    queue = FairQueue()
    for number in range(9):
        queue.add(waiting(f"a{number}", "a", number, weight=2.0))
        queue.add(waiting(f"b{number}", "b", number))
    first = Counter(name[0] for name in admitted(queue, 9))
    assert first == {"a": 6, "b": 3}


def test_who_is_passed_over_keeps_nobody_else_back():
    queue = FairQueue()
    for number in range(2):
        queue.add(waiting(f"a{number}", "a", number))
        queue.add(waiting(f"b{number}", "b", number))
    assert admitted(queue, passed={"a0", "a1", "b0"}) == ["b1"]
    queue.remove(next(queue.in_order()))
    assert admitted(queue) == ["a1", "b0"]
    assert len(queue) == queue.num_tokens == 0


def test_tenants_who_owe_nothing_are_forgotten():
    queue = FairQueue()
    queue.add(waiting("z0", "flood", 0))
    queue.add(waiting("z1", "flood", 1))
    for number in range(1000):
        request = waiting(f"a{number}", f"address {number}")
        queue.add(request)
        queue.remove(request)
    assert len(queue._accounts) < 100
    assert len(queue._heap) < 100


# -- over an engine ------------------------------------------------------------------------------

# The fixtures are functions that make new engines.
many = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SLOTS = 4
MOST_TOKENS = 12  # of a prompt, and of an answer


class Load:
    """Tenants who keep a number of requests at an engine each."""

    def __init__(self, engine, make_request, rng: random.Random):
        self.engine, self.rng, self.make_request = engine, rng, make_request
        self.numbers = count()
        self.tenants: dict[str, list[Request]] = {}
        self.tokens: Counter[str] = Counter()  # of prompts that joined, and answers

    def top_up(self, tenant: str, num_requests: int, **fields) -> None:
        there = [each for each in self.tenants.get(tenant, ()) if not each.is_finished]
        while len(there) < num_requests:
            number = next(self.numbers)
            prompt = [number] * self.rng.randint(1, MOST_TOKENS)
            request = self.make_request(
                f"r{number}", prompt, self.rng.randint(1, MOST_TOKENS), tenant=tenant, **fields
            )
            self.engine.add(request)
            there.append(request)
        self.tenants[tenant] = there

    def step(self) -> None:
        step = self.engine.step()
        for item in step.batch.items:
            if item.start + item.num_tokens <= item.request.num_prompt_tokens:
                self.tokens[item.request.tenant] += item.num_tokens
        for update in step.updates:
            self.tokens[update.request.tenant] += len(update.new_token_ids)
        if len(self.engine.scheduler.waiting):  # work conserving
            assert len(self.engine.scheduler.running) == SLOTS or step.stats.num_finished


def engine_of_slots(make_engine):
    return make_engine(
        num_blocks=64,
        prefix_caching=False,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        max_model_len=64,
    )


@many
@given(seed=st.integers(0, 2**32), flood=st.integers(SLOTS + 1, 60), tenants=st.integers(2, 4))
def test_a_flood_takes_no_more_than_its_share(seed, flood, tenants, make_engine, make_request):
    load = Load(engine_of_slots(make_engine), make_request, random.Random(seed))
    load.top_up("flood", flood)
    for _ in range(load.rng.randrange(20)):
        load.step()
        load.top_up("flood", flood)
    before = Counter(load.tokens)
    others = [f"tenant {number}" for number in range(1, tenants)]
    bound = 2 * SLOTS * 2 * MOST_TOKENS  # what all slots hold, twice
    for _ in range(120):
        load.top_up("flood", flood)
        for name in others:
            load.top_up(name, 2 * SLOTS)  # there is always one that waits
        load.step()
        got = [load.tokens[name] - before[name] for name in ("flood", *others)]
        assert max(got) - min(got) <= bound
    assert min(got) > bound  # so that the bound says something


@many
@given(seed=st.integers(0, 2**32), flood=st.integers(SLOTS + 1, 60))
def test_nobody_starves(seed, flood, make_engine, make_request):
    load = Load(engine_of_slots(make_engine), make_request, random.Random(seed))
    names = ["flood", "busy", "quiet"]
    waited: Counter[str] = Counter()
    for step in range(200):
        load.top_up("flood", flood, priority=load.rng.randint(-3, 3))
        load.top_up("busy", load.rng.randint(1, 8))
        if step % 30 == 0:
            load.top_up("quiet", 1)
        load.step()
        for name in names:
            has_place = any(
                each.status is RequestStatus.RUNNING or each.is_finished
                for each in load.tenants[name]
            )
            waited[name] = 0 if has_place else waited[name] + 1
            assert waited[name] <= 3 * MOST_TOKENS


def test_slots_that_one_request_held_go_to_who_waits(make_engine, make_request, run):
    """n = 8 samples of one tenant hold all slots; as each ends, the next place is the other's."""
    engine = make_engine(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(8):
        engine.add(make_request(f"a{number}", [1] * 3, 4 + 2 * number, tenant="a"))
    engine.step()
    for number in range(3):
        engine.add(make_request(f"b{number}", [2] * 3, 9, tenant="b"))
    ended = [request.request_id for request in run(engine)]
    assert ended[:2] == ["a0", "a1"]
    assert max(map(ended.index, ("b0", "b1", "b2"))) < min(map(ended.index, ("a4", "a5", "a6")))


def test_a_flood_that_came_before_takes_no_blocks_from_who_joined_later(make_engine, make_request):
    """Only those that ran when it joined may."""
    engine = make_engine(num_blocks=24, block_size=2, max_num_seqs=4, prefix_caching=False)
    for number in range(30):
        engine.add(make_request(f"a{number}", [number] * 4, 20, tenant="a"))
    for _ in range(2):
        engine.step()
    late = make_request("b0", [99] * 4, 40, tenant="b")
    engine.add(late)
    ended = 0
    while not late.is_finished:
        step = engine.step()
        ended += sum(update.request.is_finished for update in step.updates)
        engine.check_integrity()
    assert 0 < late.num_preemptions <= 3  # by all of them in their order, it would be 7 times
    assert ended <= 6


def test_who_is_behind_whom():
    def running(name: str, tenant: str, key: int, turn: int) -> Request:
        request = waiting(name, tenant, key)
        request.turn = turn
        return request

    first, urgent = running("r1", "a", 5, 1), running("r2", "a", -9, 4)
    other, last = running("r3", "b", 0, 2), running("r4", "b", 1, 3)
    everybody = [first, urgent, other, last]
    order = sorted(everybody, key=lambda each: -len(behind(each, everybody)))
    assert order == [urgent, other, last, first]
    assert behind(first, [first, urgent]) == [] and behind(urgent, [first, urgent]) == [first]


@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")])
def test_preempted_requests_come_back_first_and_all_end(tenants, make_engine, make_request, run):
    engine = make_engine(num_blocks=10, max_num_seqs=4, prefix_caching=False)
    requests = [
        make_request(f"r{number}", [number] * 6, 16, tenant=tenants[number % 2])
        for number in range(8)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_integrity()
        queue = engine.scheduler.waiting
        lines = [account.waiting for account in queue._accounts.values() if account.waiting]
        for line in lines:
            again = [bool(request.num_preemptions) for request in line]
            assert again == sorted(again, reverse=True)
    assert any(request.num_preemptions for request in requests)
    assert all(request.num_output_tokens == 16 for request in requests)
