"""What a step costs outside of the model: scheduling, bookkeeping and building the inputs.

An executor that builds the arrays of each step and answers at once takes the place of the model.
Prints the median of single steps while everything decodes, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from octavo.core.batch import Batch, StepOutput
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.executor import FinishedStep
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.runtime.input_batch import InputBatch

BLOCK_SIZE = 16


class InstantExecutor:
    """Gives every request token 1; builds the inputs of a forward pass if it is told to."""

    depth = 1

    def __init__(self, num_blocks: int, inputs: InputBatch | None):
        self._num_blocks = num_blocks
        self._inputs = inputs

    def kv_capacity(self) -> int:
        return self._num_blocks

    def submit(self, batch: Batch) -> FinishedStep:
        if self._inputs is not None:
            self._inputs.build(batch)
        tokens = {item.request.request_id: [1] for item in batch.items if item.samples}
        return FinishedStep(StepOutput(tokens))

    def close(self) -> None:
        pass


def microseconds_per_step(batch_size: int, build_inputs: bool, prompt: int, steps: int) -> float:
    max_model_len = prompt + steps + 8
    num_blocks = batch_size * (max_model_len // BLOCK_SIZE + 2)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=batch_size * prompt,
            max_num_seqs=batch_size,
            max_model_len=max_model_len,
        ),
        BlockManager(num_blocks, BLOCK_SIZE, RadixPrefixCache(BLOCK_SIZE)),
    )
    inputs = InputBatch(batch_size, max_model_len // BLOCK_SIZE + 1, BLOCK_SIZE)
    engine = Engine(scheduler, InstantExecutor(num_blocks, inputs if build_inputs else None))
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    for index in range(batch_size):
        # Different prompts: nothing is shared, every request has blocks of its own.
        engine.add(Request(str(index), [index + 2] * prompt, params, 0.0))
    engine.step()
    times = []
    for _ in range(steps - 2):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {}
    for batch_size in (1, 8, 64):
        alone = microseconds_per_step(batch_size, False, args.prompt, args.steps)
        whole = microseconds_per_step(batch_size, True, args.prompt, args.steps)
        result[batch_size] = {
            "scheduler_us": round(alone, 1),
            "scheduler_and_inputs_us": round(whole, 1),
            "scheduler_steps_per_s": round(1e6 / alone),
        }
    if args.json:
        print(json.dumps(result))
        return
    print("batch   scheduler   + inputs   scheduler alone")
    for batch_size, row in result.items():
        print(
            f"{batch_size:>5}   {row['scheduler_us']:>6} us   "
            f"{row['scheduler_and_inputs_us']:>5} us   {row['scheduler_steps_per_s']:>9,} steps/s"
        )


if __name__ == "__main__":
    main()
