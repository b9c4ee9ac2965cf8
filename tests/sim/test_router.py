"""Routers over many steps, with outages and hot prefixes, beside one that sees all caches."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from simulating import at_times, fleet_spec

from octavo.core import routing
from octavo.core.disaggregation import LongerThan
from octavo.core.routing import MAX_LOAD, TrackedReplica
from octavo.sim.fleet import Disaggregation
from octavo.sim.prompts import PromptSpec
from octavo.sim.settings import Outage
from octavo.workload.arrivals import arrival_times

NUM_REPLICAS = 4


def hot_prefixes(num: int, seed: int) -> list[PromptSpec]:
    """Prompts with beginnings of which few are asked for often, and many seldom."""
    draw = random.Random(seed)
    lengths = [draw.randint(200, 1200) for _ in range(40)]
    weights = [1 / (1 + kind) for kind in range(40)]
    prompts = []
    for number in range(num):
        (kind,) = draw.choices(range(40), weights)
        shared = range(10**7 * (1 + kind), 10**7 * (1 + kind) + lengths[kind])
        own = range(number * 1000, number * 1000 + draw.randint(5, 200))
        # Some hang up.
        patience = draw.choice([None] * 19 + [0.5])
        prompts.append(
            PromptSpec(str(number), (shared, own), draw.randint(1, 60), patience_s=patience)
        )
    return prompts


class CheckedRouter(routing.PrefixAware):
    """Looks at each choice."""

    num_choices = 0

    def choose(self, ask, replicas):
        chosen = super().choose(ask, replicas)
        total = sum(replica.num_requests for replica in replicas) + 1
        assert chosen.num_requests + 1 <= MAX_LOAD * total / len(replicas) + 1
        CheckedRouter.num_choices += 1
        return chosen


@pytest.mark.parametrize(
    "num_requests", [800, pytest.param(45_000, marks=pytest.mark.long, id="a million steps")]
)
def test_nothing_is_lost_whatever_fails(num_requests, monkeypatch):
    monkeypatch.setitem(routing.ROUTERS, "prefix_aware", CheckedRouter)
    draw = random.Random(num_requests)
    prompts = hot_prefixes(num_requests, seed=3)
    times = arrival_times(num_requests, 12.0, seed=3)
    outages = [
        Outage(draw.randrange(NUM_REPLICAS), draw.uniform(0, times[-1]), draw.choice([0.0, 2.0]))
        for _ in range(5 + num_requests // 1000)
    ]
    spec = fleet_spec(
        num_replicas=NUM_REPLICAS,
        router="prefix_aware",
        outages=outages,
        num_blocks=600,
        max_num_seqs=32,
        max_model_len=2048,
    )
    before = CheckedRouter.num_choices
    result = at_times(prompts, times, spec)
    served = Counter(request.prompt.request_id for request in result.requests)
    assert served == Counter(prompt.request_id for prompt in prompts)  # each once
    for request in result.requests:
        record = request.record
        if record.error is None:
            assert record.output_tokens == sum(record.event_tokens) == request.prompt.output_len
            assert len(request.output) == len(set(request.output))  # no token comes twice
        else:
            assert "hung up" in record.error
    times_sent = sum(request.times_sent for request in result.requests)
    assert times_sent > num_requests
    assert CheckedRouter.num_choices - before >= times_sent - len(outages)
    if num_requests > 40_000:
        assert sum(replica.num_steps for replica in result.replicas) >= 10**6


@pytest.mark.parametrize(
    "num_requests, router, stages",
    [
        (800, "prefix_aware", 1),
        (800, "least_loaded", 1),
        (800, "prefix_aware", 3),
        pytest.param(75_000, "prefix_aware", 1, marks=pytest.mark.long, id="a million steps"),
        pytest.param(
            45_000, "prefix_aware", 3, marks=pytest.mark.long, id="a million steps of pipelines"
        ),
    ],
)
def test_nothing_is_lost_where_prompts_are_apart(num_requests, router, stages):
    """Whichever replicas fail, all of a role too, amid prompts, transfers and answers."""
    draw = random.Random(num_requests)
    prompts = hot_prefixes(num_requests, seed=4)
    times = arrival_times(num_requests, 12.0, seed=4)
    outages = [
        Outage(draw.randrange(NUM_REPLICAS), draw.uniform(0, times[-1]), draw.choice([0.0, 2.0]))
        for _ in range(8 + num_requests // 1000)
    ]
    middle = times[-1] / 2
    outages += [Outage(number, middle, 3.0) for number in range(2)]  # all that compute prompts
    outages += [Outage(number, middle + 9.0, 3.0) for number in range(2, NUM_REPLICAS)]
    apart = Disaggregation(2, lambda tokens: 0.002 + tokens * 2e-5, LongerThan(150))
    spec = fleet_spec(
        num_replicas=NUM_REPLICAS,
        router=router,
        outages=outages,
        apart=apart,
        stages=stages,
        num_blocks=600,
        max_num_seqs=32,
        max_model_len=2048,
    )
    result = at_times(prompts, times, spec)
    served = Counter(request.prompt.request_id for request in result.requests)
    assert served == Counter(prompt.request_id for prompt in prompts)
    for request in result.requests:
        record = request.record
        if record.error is None:
            assert record.output_tokens == sum(record.event_tokens) == request.prompt.output_len
            assert len(request.output) == len(set(request.output))
        else:
            assert "hung up" in record.error
    assert sum(request.times_sent for request in result.requests) > num_requests
    steps = [replica.num_steps for replica in result.replicas]
    assert min(steps) > num_requests // 20
    if num_requests > 40_000:
        assert sum(steps) >= 10**6


def test_a_front_counts_as_the_engines_do(monkeypatch):
    """At the end nothing is left over, whatever was aborted and refused meanwhile."""
    made: list[TrackedReplica] = []

    class Kept(TrackedReplica):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("octavo.sim.router.TrackedReplica", Kept)
    prompts = hot_prefixes(200, seed=5)
    prompts[20] = PromptSpec("20", (range(5000),), 5)  # is too long
    spec = fleet_spec(
        num_replicas=3, router="prefix_aware", num_blocks=300, max_model_len=2048, max_num_seqs=4
    )
    result = at_times(prompts, arrival_times(200, 15.0, seed=1), spec)
    assert {request.record.status for request in result.requests} == {200, 400}
    assert [(each.num_requests, each.waiting_tokens, each.held_tokens) for each in made] == [
        (0, 0, 0)
    ] * 3
    assert all(0 < each.num_known_blocks <= 300 for each in made)


def hit_rate(prompts: list[PromptSpec], times, router: str, num_blocks: int) -> float:
    spec = fleet_spec(
        num_replicas=NUM_REPLICAS,
        router=router,
        num_blocks=num_blocks,
        max_num_seqs=32,
        max_model_len=2048,
    )
    replicas = at_times(prompts, times, spec).replicas
    hits = sum(each.prefix_tokens_hit for each in replicas)
    return hits / sum(each.prefix_tokens_queried for each in replicas)


@pytest.mark.parametrize("num_blocks", [500, 3000])
@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.long)])
def test_what_was_sent_tells_nearly_as_much_as_the_caches(seed, num_blocks):
    prompts, times = hot_prefixes(700, seed), arrival_times(700, 12.0, seed=seed)
    rates = {
        name: hit_rate(prompts, times, name, num_blocks)
        for name in ("least_loaded", "prefix_aware", "prefix_oracle")
    }
    assert rates["prefix_aware"] >= 0.9 * rates["prefix_oracle"]
    assert rates["prefix_aware"] > rates["least_loaded"]
