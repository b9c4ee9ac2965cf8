"""How many users fit? The engine's own scheduler, in virtual time, on a card that is not here."""

import random

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.simulated import SimulatedExecutor
from octavo.sim.cost_model import ModelCost, RooflineCost
from octavo.sim.hardware import HardwareSpec

# Llama 3.1 8B in 16 bits, on one card of 80 GB.
MODEL = ModelCost(6_979_321_856, 525_336_576, 15_009_316_864, 131_072, 32 * 32 * 128)
CARD = HardwareSpec("H100", 80e9, memory_bandwidth=3.35e12, flops=989e12, step_overhead=1e-3)
BLOCK_SIZE, NUM_BLOCKS = 16, 28_000
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)

for requests_per_second in (5, 10, 20, 40, 80):
    rng, clock = random.Random(0), VirtualClock()
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, RadixPrefixCache(BLOCK_SIZE))
    executor = SimulatedExecutor(RooflineCost(MODEL, CARD), clock, NUM_BLOCKS)
    engine = Engine(Scheduler(SchedulerConfig(max_num_seqs=256), blocks), executor, clock)
    requests, moment = [], 0.0
    for index in range(1000):
        moment += rng.expovariate(requests_per_second)
        prompt = [rng.randrange(10**6) for _ in range(500)]
        requests.append(Request(str(index), prompt, PARAMS, arrival_time=moment))
    waiting = requests.copy()
    while waiting or engine.has_unfinished_requests:
        while waiting and waiting[0].arrival_time <= clock.now():
            engine.add(waiting.pop(0))
        if engine.step() is None:
            clock.advance_to(waiting[0].arrival_time)
    ttfts = sorted(request.stats.ttft for request in requests)
    tpots = sorted(request.stats.tpot for request in requests)
    print(
        f"{requests_per_second:>3} requests/s: TTFT p50 {ttfts[500] * 1e3:6.0f} ms, "
        f"p99 {ttfts[990] * 1e3:6.0f} ms; TPOT p99 {tpots[990] * 1e3:5.1f} ms"
    )
