"""How many users of Llama 3.1 8B fit one card of 80 GB? The real scheduler, in virtual time."""

import random

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.simulated import SimulatedExecutor
from octavo.sim.cost_model import AttentionCost, ModelCost, RooflineCost
from octavo.sim.hardware import HardwareSpec

MODEL = ModelCost(6_979_321_856, 1.396e10, 525_336_576, 1.05e9, (AttentionCost(131_072, 131_072),))
CARD = HardwareSpec("H100", 80e9, memory_bandwidth=3.35e12, flops=989e12, step_overhead=1e-3)
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)


def main() -> None:
    for requests_per_second in (5, 10, 20, 40, 80):
        clock, moment, requests = VirtualClock(), 0.0, []
        executor = SimulatedExecutor(RooflineCost(MODEL, CARD), clock, 28_000)
        engine = Engine(Scheduler(SchedulerConfig(), BlockManager(28_000, 16)), executor, clock)
        for index in range(1000):
            moment += random.expovariate(requests_per_second)
            requests.append(Request(str(index), [0] * 500, PARAMS, arrival_time=moment))
            while clock.now() < moment:
                if engine.step() is None:
                    clock.advance_to(moment)
            engine.add(requests[-1])
        while engine.has_unfinished_requests:
            engine.step()
        ttfts = sorted(request.stats.ttft * 1e3 for request in requests)
        print(f"{requests_per_second:>3}/s: TTFT p50 {ttfts[500]:.0f}, p99 {ttfts[990]:.0f} ms")


if __name__ == "__main__":
    main()
