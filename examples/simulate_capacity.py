"""How many users of Llama 3.1 8B fit one card of 80 GB? The real scheduler, in virtual time."""

import random

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.cost.hardware_table import find_device
from octavo.cost.rank_model import AttentionOp, MatrixOp, RankModel
from octavo.cost.step_cost import StepModel
from octavo.executor.simulated import SimulatedExecutor

WEIGHTS = MatrixOp("layer", 32, 4096, 4096, num_params=234_520_576, num_bytes=469_041_152)
LLAMA = RankModel((WEIGHTS,), (AttentionOp("attention", 32, 16_384, 4096),), 4096, 128_256, 32)
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)


def main() -> None:
    seconds = StepModel.of(LLAMA, find_device("H100 SXM")[0], "vllm").seconds
    for requests_per_second in (5, 10, 20, 40, 80):
        clock, moment, requests = VirtualClock(), 0.0, []
        executor = SimulatedExecutor(seconds, clock, 28_000)
        engine = Engine(Scheduler(SchedulerConfig(), BlockManager(28_000, 16)), executor, clock)
        for index in range(1000):
            moment += random.expovariate(requests_per_second)
            requests.append(Request(str(index), [0] * 500, PARAMS, arrival_time=moment))
            while clock.now() < moment:
                engine.step() or clock.advance_to(moment)
            engine.add(requests[-1])
        list(iter(engine.step, None))
        ttfts = sorted(request.stats.ttft * 1e3 for request in requests)
        print(f"{requests_per_second:>3}/s: TTFT p50 {ttfts[500]:.0f}, p99 {ttfts[990]:.0f} ms")


if __name__ == "__main__":
    main()
