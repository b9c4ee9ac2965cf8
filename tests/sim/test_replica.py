"""A replica takes the steps that production's loop takes."""

from __future__ import annotations

import random

import pytest
from simulating import at_times, replica_spec

from octavo.assembly.engine import build_engine
from octavo.core.clock import VirtualClock
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.simulated import SimulatedExecutor
from octavo.sim.fleet import FleetSpec
from octavo.sim.prompts import PromptSpec


def by_shape(batch) -> float:
    return 0.005 + 1e-4 * batch.num_tokens + 1e-6 * sum(item.start for item in batch.items)


def as_a_driver(spec, prompts, times):
    """``EngineLoop.step`` in virtual time: obey what has come, then step, or wait for a command.
    (tokens of each step, and when it ended)"""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        spec.cost,
        clock,
        spec.config.cache.num_blocks,
        depth=spec.depth,
        feeds_tokens=spec.feeds_tokens,
        host_seconds=spec.host_seconds,
    )
    engine = build_engine(spec.config, executor, clock)
    pending = list(zip(prompts, times, strict=True))
    steps = []
    while pending or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            clock.advance_to(pending[0][1])
        while pending and pending[0][1] <= clock.now():
            prompt, time = pending.pop(0)
            tokens = [token for piece in prompt.pieces for token in piece]
            params = SamplingParams(max_tokens=prompt.output_len, temperature=0.0, ignore_eos=True)
            engine.add(Request(prompt.request_id, tokens, params, time, prompt.priority))
        step = engine.step()
        if step is not None:
            steps.append((shape_of(step), clock.now()))
    return steps


def shape_of(step) -> list:
    return [(item.request.request_id, item.start, item.num_tokens) for item in step.batch.items]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_replica_is_driven_as_a_server_drives_its_engine(seed, depth):
    rng = random.Random(seed)
    shared = range(10**6, 10**6 + 40)
    lengths = [rng.randint(1, 60) for _ in range(40)]
    prompts = [
        PromptSpec(
            str(index),
            (shared[: rng.choice([0, 20, 40])], range(index * 100, index * 100 + length)),
            rng.randint(1, 30),
            priority=rng.choice([0, 0, 1]),
        )
        for index, length in enumerate(lengths)
    ]
    times = sorted(rng.uniform(0, 2) for _ in prompts)
    spec = replica_spec(
        by_shape,
        num_blocks=30,
        block_size=8,
        depth=depth,
        max_num_seqs=rng.choice([4, 12]),
        max_num_batched_tokens=64,
        max_model_len=200,
        target_step_seconds=0.02,
    )
    seen = []
    result = at_times(prompts, times, FleetSpec(spec), watch=seen.append)
    taken = [(shape_of(step_times.step), step_times.ended) for step_times in seen]
    assert taken == as_a_driver(spec, prompts, times)
    assert len(taken) > 60 and all(record.completed for record in result.records)
