"""The simulator and the model, given the same work, take the same steps: one policy, two worlds."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.hashing import HashExecutor, expected_tokens
from octavo.executor.local import LocalExecutor
from octavo.executor.simulated import SimulatedExecutor
from octavo.kernels.dispatch import create_ops
from octavo.models.loader import load_model
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.model_runner import ModelRunner

NUM_BLOCKS, BLOCK_SIZE = 28, 2
CONFIG = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=64)


def workload(seed: int) -> list[tuple[int, dict]]:
    """(step of arrival, fields of a request), with shared prefixes, forks and priorities."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 90) for _ in range(20)]
    arrivals = []
    for index in range(25):
        prompt = shared[: rng.choice([0, 9, 20])] + [
            rng.randrange(2, 90) for _ in range(rng.randint(1, 15))
        ]
        fields = {
            "request_id": f"r{index}",
            "prompt_token_ids": prompt,
            "params": SamplingParams(
                max_tokens=rng.randint(1, 20), ignore_eos=True, temperature=rng.choice([0.0, 1.0])
            ),
            "arrival_time": 0.0,
            "priority": rng.choice([0, 0, 1]),
            "seed": index,
        }
        arrivals.append((rng.randint(0, 40), fields))
    return sorted(arrivals, key=lambda arrival: (arrival[0], arrival[1]["request_id"]))


def trace(executor, clock, arrivals) -> tuple[list, dict[str, list[int]]]:
    """Every step as (request, start, tokens), with what was preempted, copied and held."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, RadixPrefixCache(BLOCK_SIZE))
    engine = Engine(Scheduler(CONFIG, blocks), executor, clock)
    pending = list(arrivals)
    steps, answers = [], {}
    for number in range(2000):
        while pending and pending[0][0] <= number:
            engine.add(Request(**pending.pop(0)[1]))
        if number == 12:
            engine.abort("r3")
        step = engine.step()
        if step is None:
            if not pending:
                break
            continue
        items = [(i.request.request_id, i.start, i.num_tokens) for i in step.batch.items]
        batch, stats = step.batch, step.stats
        steps.append(
            (number, items, batch.preempted_ids, batch.block_copies, stats.num_used_blocks)
        )
        for update in step.updates:
            if update.request.is_finished:
                answers[update.request.request_id] = update.request.output_token_ids
    return steps, answers


def simulate(arrivals, answers: dict[str, list[int]]):
    """The same work in virtual time, with the tokens that the model gave."""

    def replay(request: Request) -> int:
        known = answers.get(request.request_id)
        return known[request.num_output_tokens] if known else 0

    clock = VirtualClock()
    executor = SimulatedExecutor(lambda batch: 0.001 * batch.num_tokens, clock, NUM_BLOCKS, replay)
    return trace(executor, clock, arrivals)


@pytest.mark.parametrize("seed", range(4))
def test_a_model_and_its_simulation_take_the_same_steps(tiny_model, seed):
    model, config = load_model(tiny_model)
    device = torch.device("cpu")
    kv_cache = KVCache(
        config.num_layers,
        NUM_BLOCKS,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
        device,
    )
    runner = ModelRunner(
        model, kv_cache, create_ops(device), device, CONFIG.max_num_seqs, CONFIG.max_model_len
    )
    arrivals = workload(seed)
    real, answers = trace(LocalExecutor(runner), None, arrivals)
    simulated, replayed = simulate(arrivals, answers)
    assert len(real) > 40 and any(preempted for _, _, preempted, *_ in real)
    assert simulated == real and replayed == answers


@pytest.mark.parametrize("seed", range(20))
def test_so_do_the_hash_model_and_its_simulation(seed):
    arrivals = workload(100 + seed)
    real, answers = trace(HashExecutor(NUM_BLOCKS, BLOCK_SIZE), None, arrivals)
    for _, fields in arrivals:
        if fields["request_id"] in answers:
            assert answers[fields["request_id"]] == expected_tokens(
                fields["prompt_token_ids"], fields["params"].max_tokens, 97
            )
    assert simulate(arrivals, answers)[0] == real
