"""Production's own engine on simulated steps, as the planner's formulas are checked against it."""

from __future__ import annotations

import random

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import NoPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.cost.prediction import Prediction
from octavo.executor.simulated import SimulatedExecutor
from octavo.planner.latency import BatchSlots
from octavo.planner.traffic import Traffic


def line_cost(
    fixed: float = 5e-3, per_token: float = 1e-4, per_key: float = 1e-8, spread: float = 0.0
):
    """A step that takes longer for each of its tokens, and for each key that they see."""

    def step_time(chunks) -> Prediction:
        tokens = sum(chunk.num_tokens for chunk in chunks)
        keys = sum(
            chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2) for chunk in chunks
        )
        seconds = fixed + per_token * tokens + per_key * keys
        return Prediction.around(seconds, spread, "roofline")

    return step_time


def serve(step_time, traffic: Traffic, slots: BatchSlots, num_requests: int, seed: int = 0):
    """The requests of a run: all at once, or at random at the rate of the traffic."""
    num_blocks = num_requests * (traffic.total_len // 16 + 2)
    clock = VirtualClock()
    config = SchedulerConfig(
        max_num_batched_tokens=slots.max_num_batched_tokens,
        max_num_seqs=slots.max_num_seqs,
        max_model_len=traffic.total_len,
        target_step_seconds=slots.target_step_seconds,
    )
    executor = SimulatedExecutor(lambda batch: step_time(batch.items).value, clock, num_blocks)
    scheduler = Scheduler(config, BlockManager(num_blocks, 16, NoPrefixCache()))
    engine = Engine(scheduler, executor, clock)
    requests = _requests(traffic, num_requests, seed)
    coming = requests[::-1]
    while coming or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            clock.advance_to(coming[-1].stats.arrival_time)
        while coming and coming[-1].stats.arrival_time <= clock.now():
            engine.add(coming.pop())
        engine.step()
    return requests


def _requests(traffic: Traffic, count: int, seed: int) -> list[Request]:
    draw, now, requests = random.Random(seed), 0.0, []
    params = SamplingParams(max_tokens=traffic.output_len, ignore_eos=True)
    for number in range(count):
        if traffic.rate is not None:
            now += draw.expovariate(traffic.rate)
        requests.append(Request(f"r{number}", [number] * traffic.input_len, params, now))
    return requests


def figures(requests) -> dict[str, float]:
    """Means in seconds, and requests a second."""
    stats = [request.stats for request in requests]
    gaps = max(1, requests[0].params.max_tokens - 1)
    return {
        "ttft": sum(each.ttft for each in stats) / len(stats),
        "tpot": sum(each.last_token_time - each.first_token_time for each in stats)
        / (gaps * len(stats)),
        "e2e": sum(each.e2e for each in stats) / len(stats),
        "requests_per_second": len(stats) / max(each.last_token_time for each in stats),
    }
