from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.step_share import PipelineShare
from octavo.cost.efficiency import IDEAL
from octavo.cost.hardware import Device
from octavo.cost.pipeline import StageTimes
from octavo.cost.rank_model import AttentionOp, MatrixOp, RankModel
from octavo.cost.step_cost import StepModel
from octavo.executor.simulated import SimulatedExecutor


def make_engine(
    cost,
    depth: int = 1,
    num_blocks: int = 64,
    *,
    feeds_tokens: bool = False,
    host_seconds: float = 0.0,
    **config,
) -> Engine:
    config = {"max_model_len": 64, "runs_ahead": feeds_tokens, **config}
    clock = VirtualClock()
    blocks = BlockManager(num_blocks, 4, RadixPrefixCache(4))
    executor = SimulatedExecutor(
        cost, clock, num_blocks, depth=depth, feeds_tokens=feeds_tokens, host_seconds=host_seconds
    )
    return Engine(Scheduler(SchedulerConfig(**config), blocks), executor, clock)


def request(name: str, num_prompt: int, max_tokens: int) -> Request:
    rng = random.Random(name)
    prompt = [rng.randrange(1000) for _ in range(num_prompt)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0.0)


def test_time_is_the_sum_of_the_costs():
    engine = make_engine(lambda batch: 0.1 * batch.num_tokens)
    one = request("a", 10, 3)
    engine.add(one)
    while engine.step() is not None:
        pass
    assert one.stats.ttft == pytest.approx(1.0)
    assert one.stats.e2e == pytest.approx(1.2)
    assert engine.clock.now() == pytest.approx(1.2)


def test_an_engine_says_when_its_next_result_comes():
    engine = make_engine(lambda batch: 2.0)
    assert engine.next_result_at is None
    engine.add(request("a", 10, 1))
    assert engine.begin_step() and engine.next_result_at == 2.0
    engine.finish_step()
    assert engine.next_result_at is None and engine.clock.now() == 2.0


def test_a_pipeline_overlaps_batches_but_never_a_request_with_itself():
    def run(depth: int) -> tuple[float, float]:
        engine = make_engine(lambda batch: 1.0, depth=depth, max_num_seqs=2)
        # One token a step: two requests make two batches.
        requests = [request(name, 1, 8) for name in "ab"]
        engine.scheduler.config = SchedulerConfig(
            max_num_batched_tokens=1, max_num_seqs=2, max_model_len=64
        )
        for one in requests:
            engine.add(one)
        while engine.step() is not None:
            pass
        assert all(one.num_output_tokens == 8 for one in requests)
        return engine.clock.now(), requests[0].stats.e2e

    sequential, _ = run(1)
    pipelined, first = run(2)
    assert sequential == pytest.approx(16.0)
    assert pipelined == pytest.approx(8.5) and first == pytest.approx(8.0)


def test_a_stage_computes_one_step_at_a_time():
    """The second of two stages takes three times as long: the first one waits for it."""
    clock = VirtualClock()
    spans = []

    class Noting(SimulatedExecutor):
        def submit(self, batch):
            handle = super().submit(batch)
            spans.append(self.last_stages)
            return handle

    times = StageTimes([1.0, 3.0], send=0.5, overhead=0.25)
    executor = Noting(
        lambda batch: times.through_all, clock, 64, depth=2, stage_cost=lambda batch: times
    )
    blocks = BlockManager(64, 4, RadixPrefixCache(4))
    config = SchedulerConfig(max_model_len=64)
    engine = Engine(Scheduler(config, blocks, share=PipelineShare(2, 64)), executor, clock)
    for name in ("a", "b"):
        engine.add(request(name, 1, 2))
    ends = []
    while engine.has_unfinished_requests:
        while len(spans) - len(ends) < 2 and engine.begin_step():
            pass
        engine.finish_step()
        ends.append(clock.now())
    begun_second = [second.begun for _, second in spans]
    assert begun_second[0] == 1.5  # after the first stage and the way between
    assert [second.ended for _, second in spans] == [begun + 3.0 for begun in begun_second]
    for earlier, later in zip(spans, spans[1:], strict=False):
        assert all(two.begun >= one.ended for one, two in zip(earlier, later, strict=True))
    assert ends[0] == 4.75 and all(b - a >= 3.0 for a, b in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("num_requests", [1, 3])
def test_steps_that_overlap_hide_what_the_host_does(num_requests):
    """With as much to do on the host as on the device, decoding takes half the time."""

    def run(depth: int) -> float:
        engine = make_engine(
            lambda batch: 1.0, depth, feeds_tokens=depth > 1, host_seconds=1.0, max_num_seqs=4
        )
        requests = [request(name, 2, 20) for name in "abc"[:num_requests]]
        for one in requests:
            engine.add(one)
        while engine.step() is not None:
            pass
        assert all(one.num_output_tokens == 20 for one in requests)
        return engine.clock.now()

    assert run(1) == pytest.approx(20 * 2)
    assert run(2) == pytest.approx(20 + 1)
    assert run(3) == pytest.approx(20 + 1)  # the device is never idle: there is nothing to gain


def lone_stream(cost, max_multi_steps: int) -> tuple[list[int], float]:
    """Tokens that each step brings, and when the last one comes."""
    engine = make_engine(cost, max_multi_steps=max_multi_steps)
    engine.add(request("a", 8, 21))
    tokens = []
    while (step := engine.step()) is not None:
        tokens.append(len(step.updates[0].new_token_ids))
    return tokens, engine.clock.now()


def reading(bandwidth: float, step_s: float = 0.0):
    """The cost of a model whose weights have 2,000 bytes, and little else."""
    model = RankModel(
        (
            MatrixOp("linear", 1, 0, 0, num_params=1000, num_bytes=1500),
            MatrixOp("head", 1, 0, 0, num_params=500, num_bytes=500, sampled_only=True),
        ),
        (AttentionOp("attention", 1, flops_per_score=32, kv_bytes_per_token=0.1),),
        hidden_size=0,
        vocab_size=0,
        num_layers=1,
        activation_bytes=0,
    )
    device = Device(
        name="d", kind="gpu", memory_bytes=1e9, memory_bandwidth=bandwidth, peaks={"fp16": 1e15}
    )
    return StepModel(model, device, replace(IDEAL, step_s=step_s)).seconds


def test_a_lone_stream_takes_several_steps_at_once_as_it_does_in_earnest():
    """Eight tokens a step, or as many as there is time for; each costs what a step costs."""
    bandwidth = 2_000_000.0  # a token takes 1 ms
    cost = reading(bandwidth)
    single, alone = lone_stream(cost, max_multi_steps=1)
    taken, together = lone_stream(cost, max_multi_steps=8)
    assert single == [1] * 21 and taken == [1, 8, 8, 4]
    assert together == pytest.approx(alone)

    slow = reading(bandwidth / 5.5)
    assert lone_stream(slow, max_multi_steps=8)[0] == [1] + [3] * 6 + [2]  # in 20 ms


def test_multi_step_saves_what_a_step_costs_besides():
    cost = reading(2_000_000.0, step_s=0.0003)
    _, alone = lone_stream(cost, max_multi_steps=1)
    taken, together = lone_stream(cost, max_multi_steps=8)
    assert alone - together == pytest.approx((21 - len(taken)) * 0.0003)


def test_two_runs_are_identical():
    def trace() -> list:
        engine = make_engine(lambda batch: 0.01, num_blocks=24, max_num_batched_tokens=16)
        steps = []
        for index in range(30):
            engine.add(request(f"r{index}", 5 + index % 7, 3 + index % 20))
            steps.append(engine.step())
        while (step := engine.step()) is not None:
            steps.append(step)
        return [
            (step.batch.step_id, step.batch.preempted_ids, step.stats.num_used_blocks)
            for step in steps
        ]

    assert trace() == trace()
