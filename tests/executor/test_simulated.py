from __future__ import annotations

import random

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.simulated import SimulatedExecutor


def make_engine(cost, depth: int = 1, num_blocks: int = 64, **config) -> Engine:
    config = {"max_model_len": 64, **config}
    clock = VirtualClock()
    blocks = BlockManager(num_blocks, 4, RadixPrefixCache(4))
    executor = SimulatedExecutor(cost, clock, num_blocks, depth=depth)
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


def test_a_pipeline_overlaps_batches_but_never_a_request_with_itself():
    def run(depth: int) -> tuple[float, float]:
        engine = make_engine(lambda batch: 1.0, depth=depth, max_num_seqs=2)
        # One seat of tokens a step: two requests make two batches.
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
