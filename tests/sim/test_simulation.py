"""What holds of every run: nothing is lost, nothing comes before its cause, no clock is read."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from itertools import takewhile
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulating import at_times, different_asks, fleet_spec, replica_spec

from octavo.base.errors import ConfigError, EngineError
from octavo.measure.concurrency import concurrency_curve
from octavo.settings.speculation import SpeculativeConfig
from octavo.sim.fleet import Disaggregation, FleetSpec
from octavo.sim.prompts import PromptSpec, prompts_of_trace
from octavo.sim.settings import ROUTER_NAMES, Outage
from octavo.sim.simulation import simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.plan import LoadPlan
from octavo.workload.traces import TraceEntry

# -- any run --------------------------------------------------------------------------------------


class Audit:
    """Sees every step: clocks go on, work is conserved, and all blocks are there."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.pauses: list[tuple[float, float]] = []  # of replicas that had work
        self.seconds: dict[str, float] = defaultdict(float)
        self._last_begin: dict[str, float] = defaultdict(float)
        self._last_end: dict[str, float] = defaultdict(float)
        self._has_work: dict[str, bool] = defaultdict(bool)

    def note(self, times) -> None:
        name, stats = times.replica, times.step.stats
        assert self._last_end[name] <= times.begun <= times.ended
        if self._has_work[name] and times.begun != self._last_end[name]:
            self.pauses.append((self._last_begin[name], times.begun))
        total = stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
        assert total == self.num_blocks and stats.num_invariant_violations == 0
        self.seconds[name] += times.ended - times.begun
        self._last_begin[name], self._last_end[name] = times.begun, times.ended
        self._has_work[name] = bool(stats.num_running or stats.num_waiting)


@st.composite
def runs(draw):
    """(asks, plan, spec without outages) of any kind that a few requests can have."""
    num = draw(st.integers(1, 14))
    rng = random.Random(draw(st.integers(0, 10**6)))
    shared = range(10**6, 10**6 + 48)
    prompts = []
    for index in range(num):
        own = range(index * 100, index * 100 + rng.randint(1, 40))
        prompt = PromptSpec(
            str(index),
            (shared[: rng.choice([0, 16, 40])], own),
            rng.randint(1, 24),
            priority=rng.choice([0, 0, 1]),
            patience_s=rng.choice([None, None, None, 0.3]),
        )
        if index and rng.random() < 0.2:
            prompt = replace(
                prompt, follows=str(rng.randrange(index)), think_s=rng.random(), goes_on=True
            )
        prompts.append(prompt)
    num_firsts = sum(prompt.follows is None for prompt in prompts)
    times = sorted(rng.uniform(0, 2) for _ in range(num_firsts)) if rng.random() < 0.7 else None
    plan = LoadPlan(times, rng.choice([2, 5]) if times is None else rng.choice([None, 3]))
    num_replicas = rng.choice([1, 1, 2, 3])
    apart = None
    if num_replicas > 1 and rng.random() < 0.3:
        apart = Disaggregation(1, lambda tokens: 1e-4 * tokens)
    spec = fleet_spec(
        num_replicas=num_replicas,
        router=rng.choice(ROUTER_NAMES),
        apart=apart,
        num_blocks=rng.choice([48, 200]),
        block_size=rng.choice([4, 8]),
        prefix_caching=rng.random() < 0.7,
        batching=rng.choice(["continuous", "continuous", "static"]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        max_model_len=192,
        max_multi_steps=rng.choice([1, 4]),
    )
    return prompts, plan, spec


@settings(max_examples=60)
@given(runs())
def test_nothing_is_lost_and_nothing_comes_before_its_cause(run):
    prompts, plan, spec = run
    audit = Audit(spec.replica.config.cache.num_blocks)
    result = simulate(prompts, plan, spec, watch=audit.note)
    done = {request.prompt.request_id: request for request in result.requests}
    assert len(done) == len(result.requests) == len(prompts)  # each once
    for request in result.requests:
        record = request.record
        assert 0 <= record.scheduled <= record.sent <= record.ended <= result.makespan_s
        if record.error is not None:
            assert "hung up" in record.error or record.status == 400
            continue
        assert record.output_tokens == sum(record.event_tokens) == request.prompt.output_len
        assert record.sent <= request.first_scheduled < record.first_token <= record.last_token
        assert record.event_times == sorted(record.event_times)
        assert record.last_token == record.ended
        if request.prompt.follows is not None:
            before = done[request.prompt.follows].record
            assert record.scheduled == pytest.approx(before.ended + request.prompt.think_s)
    ends = [each.record.ended for each in result.requests if each.record.error is not None]
    for begin, end in audit.pauses:  # only a client that hangs up takes a replica's work away
        assert any(begin <= moment < end for moment in ends)
    for totals in result.replicas:
        # Step accounting: what is not busy is idle, and nothing is counted twice.
        assert totals.busy_s == pytest.approx(audit.seconds.get(totals.name, 0.0))
        assert totals.busy_s <= result.makespan_s + 1e-9


@settings(max_examples=25)
@given(runs(), st.integers(0, 10**6))
def test_whoever_fails_nobody_is_forgotten(run, seed):
    prompts, plan, spec = run
    rng = random.Random(seed)
    lasting = (0.0, 0.5, math.inf)
    outages = tuple(
        Outage(rng.randrange(spec.num_replicas), rng.uniform(0, 2), rng.choice(lasting))
        for _ in range(rng.randint(1, 3))
    )
    result = simulate(prompts, plan, replace(spec, outages=outages))
    assert len(result.requests) <= len(prompts)  # who follows one that was never served is not sent
    for request in result.requests:
        record = request.record
        assert request.is_over
        if record.error is None:
            assert record.output_tokens == sum(record.event_tokens) == request.prompt.output_len
            assert record.sent <= record.first_token
    if all(outage.lasts_s < math.inf for outage in outages):
        errors = [f.record.error for f in result.requests if f.record.error is not None]
        assert all("hung up" in error or "tokens" in error for error in errors)


def test_the_times_of_a_lone_request_are_the_costs_of_its_steps():
    result = at_times(different_asks(1, 100, 3), [1.0], fleet_spec())
    (request,) = result.requests
    record = request.record
    assert (record.sent, request.first_scheduled) == (1.0, 1.0)
    assert record.ttft == pytest.approx(by_tokens_of(100))
    assert record.itls == pytest.approx([by_tokens_of(1)] * 2)
    (totals,) = result.replicas
    assert totals.num_steps == 3 and totals.tokens_computed == 102
    assert totals.busy_s == pytest.approx(record.e2el)
    assert result.makespan_s - totals.busy_s == pytest.approx(1.0)


def by_tokens_of(num_tokens: int) -> float:
    return 0.01 + 1e-4 * num_tokens


def test_who_comes_while_a_step_runs_waits_for_its_end():
    spec = fleet_spec(lambda batch: 1.0)
    first, second = at_times(different_asks(2, 10, 2), [0.0, 0.5], spec).requests
    assert first.record.event_times == [1.0, 2.0]
    assert second.first_scheduled == 1.0 and second.record.event_times == [2.0, 3.0]


def test_steps_overlap_where_the_executor_can():
    prompts = different_asks(2, 10, 9)
    apart, overlapping = (
        at_times(prompts, [0, 0], fleet_spec(lambda batch: 1.0, depth=depth)) for depth in (1, 2)
    )
    for plain, ahead in zip(apart.records, overlapping.records, strict=True):
        assert ahead.output_tokens == plain.output_tokens == 9
    (totals,) = overlapping.replicas
    assert totals.busy_s == pytest.approx(overlapping.makespan_s)


# -- determinism ----------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from simulating import fleet_spec, at_times
from octavo.sim.prompts import prompts_of_trace
from octavo.workload.traces import TraceEntry
from octavo.sim.timeline import Timeline, trace_json
entries = [TraceEntry(i * 0.01, 40 + i, 9, (0, 1, i), 16, priority=i % 3) for i in range(60)]
prompts = prompts_of_trace(entries)
spec = fleet_spec(num_replicas=3, router="prefix_aware", num_blocks=60, max_num_seqs=6,
                  max_model_len=256)
timeline = Timeline()
result = at_times(prompts, [each.arrival_s for each in prompts], spec, watch=timeline.note)
print(json.dumps([record.as_json() for record in result.records]))
print(trace_json(timeline.trace(result.requests)))
"""


def test_the_same_seed_gives_the_same_bytes_whatever_hashes_are():
    outputs = set()
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, env=environment, check=True
        )
        outputs.add(found.stdout)
    assert len(outputs) == 1 and len(outputs.pop()) > 10_000


def test_no_clock_is_read(monkeypatch):
    own_thread = threading.get_ident()

    def refused(clock):
        def refuse(*arguments):
            # Another test's server may have a thread here, which needs its clocks.
            if threading.get_ident() == own_thread:
                raise AssertionError("a simulation has looked at a real clock")
            return clock(*arguments)

        return refuse

    names = ("time", "monotonic", "perf_counter", "process_time", "sleep")
    for name in names + tuple(f"{name}_ns" for name in names[:4]):
        monkeypatch.setattr(time, name, refused(getattr(time, name)))
    spec = fleet_spec(
        num_replicas=2,
        num_blocks=40,
        outages=[Outage(0, 0.5, 1.0)],
        max_model_len=256,
        speculation=SpeculativeConfig(synthetic_acceptance_rates=(0.5, 0.5)),
        target_step_seconds=0.05,
    )
    result = at_times(different_asks(30), [0.05 * index for index in range(30)], spec)
    monkeypatch.undo()
    assert all(record.completed for record in result.records)


# -- production's features ------------------------------------------------------------------------


def test_static_batching_is_never_faster():
    prompts = [
        PromptSpec(str(i), (range(i * 50, i * 50 + 50),), 5 + 7 * (i % 5)) for i in range(80)
    ]
    times = arrival_times(80, 20.0, seed=2)
    static, continuous = (
        at_times(prompts, times, fleet_spec(batching=batching, max_num_seqs=8))
        for batching in ("static", "continuous")
    )
    assert fmean(r.e2el for r in static.records) > 1.2 * fmean(r.e2el for r in continuous.records)
    assert static.makespan_s >= continuous.makespan_s


def test_the_prefix_cache_hits_what_the_hashes_of_a_trace_say():
    rng = random.Random(3)
    beginnings = [tuple(range(i * 10, i * 10 + rng.randint(1, 6))) for i in range(5)]
    entries = []
    for index in range(60):
        ids = (
            *rng.choice(beginnings),
            *range(1000 + index * 4, 1000 + index * 4 + rng.randint(1, 4)),
        )
        length = len(ids) * 512 - rng.randrange(512)
        entries.append(TraceEntry(index * 100.0, length, 4, ids))
    prompts = prompts_of_trace(entries)
    spec = fleet_spec(num_blocks=40_000, max_model_len=10_000, max_num_batched_tokens=8192)
    result = at_times(prompts, [prompt.arrival_s for prompt in prompts], spec)
    seen: set[int] = set()
    for entry, record in zip(entries, result.records, strict=True):
        num_seen = sum(1 for _ in takewhile(seen.__contains__, entry.hash_ids))
        # Whole blocks of the engine, and never the last token, whose logits are needed.
        shared = min(num_seen * 512, entry.input_len - 1) // 16 * 16
        assert record.cached_tokens == shared
        seen.update(entry.hash_ids)
    assert sum(record.cached_tokens for record in result.records) > 50_000
    without = at_times(
        prompts,
        [prompt.arrival_s for prompt in prompts],
        fleet_spec(
            num_blocks=40_000,
            max_model_len=10_000,
            max_num_batched_tokens=8192,
            prefix_caching=False,
        ),
    )
    assert not any(record.cached_tokens for record in without.records)
    assert fmean(r.ttft for r in without.records) > fmean(r.ttft for r in result.records)


def test_a_conversation_finds_all_that_was_said_in_the_cache():
    first, second = different_asks(2, 64, 33)
    second = replace(second, follows="0", think_s=5.0, goes_on=True)
    one, two = at_times([first, second], [0.0], fleet_spec()).records
    assert two.prompt_tokens == 64 + 33 + 64 and two.scheduled == one.ended + 5.0
    assert two.cached_tokens == (64 + 33 - 1) // 16 * 16  # the last token was never computed


def test_speculation_brings_the_tokens_that_the_formula_says():
    rates = (0.8, 0.6, 0.5)
    spec = fleet_spec(speculation=SpeculativeConfig(synthetic_acceptance_rates=rates))
    result = at_times(different_asks(60, 20, 200), [0.0] * 60, spec)
    (totals,) = result.replicas
    # Tokens of a cycle: 1 + a + ab + abc; of a draft so many are accepted, with this variance.
    chances = [math.prod(rates[:i]) * (1 - (rates[i] if i < 3 else 0)) for i in range(4)]
    mean = sum(i * p for i, p in enumerate(chances))
    sigma = math.sqrt(sum((i - mean) ** 2 * p for i, p in enumerate(chances)) / totals.num_drafts)
    # Drafts that end with their request are shorter: one of the forty of each.
    assert totals.num_drafts > 4000
    assert totals.draft_tokens_accepted / totals.num_drafts == pytest.approx(
        mean, abs=3 * sigma + 0.01
    )
    plain = at_times(different_asks(60, 20, 200), [0.0] * 60, fleet_spec())
    assert [r.output_tokens for r in result.records] == [r.output_tokens for r in plain.records]
    assert totals.num_steps < 0.6 * plain.replicas[0].num_steps


def test_preemption_loses_no_token():
    spec = fleet_spec(num_blocks=24, max_model_len=256)
    result = at_times(different_asks(12, 40, 60), [0.0] * 12, spec)
    assert result.num_preemptions > 0
    assert [record.output_tokens for record in result.records] == [60] * 12


def test_priorities_overtake():
    prompts = [
        replace(prompt, priority=-ask_index) for ask_index, prompt in enumerate(different_asks(4))
    ]
    result = at_times(prompts, [0.0, 0.001, 0.001, 0.001], fleet_spec(max_num_seqs=1))
    order = sorted(result.requests, key=lambda request: request.first_scheduled)
    assert [request.prompt.request_id for request in order] == ["0", "3", "2", "1"]


def test_multi_steps_are_those_of_production():
    cost = lambda batch: 0.001 * batch.num_multi_steps  # noqa: E731
    spec = fleet_spec(cost, max_multi_steps=8)
    (record,) = at_times(different_asks(1, 10, 41), [0.0], spec).records
    assert record.event_tokens == [1, 8, 8, 8, 8, 8]


# -- clients --------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_in_flight():
    result = simulate(different_asks(20), LoadPlan(None, 4), fleet_spec())
    curve = concurrency_curve(result.records)
    counts = [number for _, number in curve]
    assert max(counts) == 4 and counts[:-4] == [4] * len(counts[:-4])


def test_an_open_loop_with_a_limit_waits_with_the_client():
    plan = LoadPlan([0.0, 0.0, 0.0], max_concurrency=1)
    records = simulate(different_asks(3), plan, fleet_spec()).records
    assert [record.sent for record in records[1:]] == [record.ended for record in records[:-1]]
    assert [record.send_lag for record in records] == [0.0] * 3
    assert records[2].queue_time == records[2].sent


def test_nothing_is_sent_when_the_time_is_over():
    times = [0.1 * index for index in range(20)]
    result = simulate(different_asks(20), LoadPlan(times, duration_s=1.0), fleet_spec())
    assert [record.scheduled for record in result.records] == times[:10]


def test_who_hangs_up_costs_no_more():
    prompts = different_asks(2, 10, 1000)
    prompts[0] = replace(prompts[0], patience_s=1.0)
    steps = []
    result = at_times(prompts, [0.0, 0.0], fleet_spec(), watch=steps.append)
    gone, served = result.requests
    assert gone.record.ended == 1.0 and "hung up after 1 s" in gone.record.error
    assert served.record.completed and not gone.record.completed
    assert all(times.step.batch.num_seqs == 1 for times in steps if times.begun > 1.1)


def test_a_run_ends_with_its_last_request_however_long_clients_would_have_waited():
    prompts = [replace(prompt, patience_s=500.0) for prompt in different_asks(2)]
    spec = fleet_spec(num_replicas=2, outages=[Outage(1, 100.0, 50.0)])
    result = at_times(prompts, [0.0, 0.0], spec)
    assert result.makespan_s == max(record.ended for record in result.records) < 2.0


def test_what_cannot_be_served_is_refused_as_the_engine_says():
    spec = fleet_spec(max_model_len=128, max_queued_requests=2, max_num_seqs=1)
    prompts = [*different_asks(5, 50, 10), PromptSpec("long", (range(200),), 10)]
    records = {r.request_id: r for r in at_times(prompts, [0.0] * 6, spec).records}
    assert records["long"].status == 400 and "128" in records["long"].error
    assert [record.status for record in records.values()].count(429) == 3
    assert sum(record.completed for record in records.values()) == 2


# -- what is wrong --------------------------------------------------------------------------------


def test_a_plan_has_a_time_for_each_request():
    with pytest.raises(ConfigError, match="2 times for 3 requests"):
        at_times(different_asks(3), [0.0, 1.0], fleet_spec())
    strange = [PromptSpec("0", (range(3),), 1, follows="nobody")]
    with pytest.raises(ConfigError, match="follows nobody"):
        at_times(strange, [], fleet_spec())


def test_a_cost_that_raises_is_no_request_s_fault():
    def broken(batch) -> float:
        raise ZeroDivisionError("no bandwidth")

    with pytest.raises(EngineError, match="no bandwidth"):
        at_times(different_asks(2), [0.0, 0.0], fleet_spec(broken))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_replicas": 0}, "at least one replica"),
        ({"router": "random"}, "no router: choose from round_robin"),
        ({"outages": (Outage(1, 0.0),)}, "no replica 1"),
        ({"outages": (Outage(0, -1.0),)}, "neither begins before"),
        ({"disaggregation": Disaggregation(1, float)}, "at least one for prompts"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        FleetSpec(replica_spec(), **fields)


def test_drafts_need_acceptance_rates():
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        fleet_spec(speculation=SpeculativeConfig(method="ngram"))


def test_progress_is_told():
    seen = []
    at_times(different_asks(3), [0.0] * 3, fleet_spec(), progress=lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]
