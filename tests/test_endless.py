"""Generations far beyond the context: flat in memory and in speed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindow
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def generate(args: EngineArgs, num_tokens: int, **asked):
    """The request, the blocks it held at most, and the engine; ``watch`` is called at each step."""
    watch = asked.pop("watch", lambda request: None)
    loaded = load_engine(args)
    engine, held = loaded.text_engine.engine, 0
    params = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=0.8, seed=1, detokenize=False, **asked
    )
    request = Request("endless", [504, 2365, 282, 260, 3427], params, 0.0, seed=1)
    request.token_ids[:] = [token % loaded.model_config.vocab_size for token in request.token_ids]
    engine.add(request)
    while (step := engine.step()) is not None:
        held = max(held, step.stats.num_used_blocks)
        watch(request)
    return request, held, loaded


def test_an_answer_may_be_many_contexts_long(tiny_model):
    args = EngineArgs(str(tiny_model), max_model_len=64, window=40, max_num_batched_tokens=32)
    request, held, loaded = generate(args, 1000)
    assert len(request.output_token_ids) == 1000 and request.error is None
    assert held <= SinkWindow(4, 40).most_blocks(16, 32)
    assert loaded.text_engine.engine.scheduler.block_manager.num_used_blocks == 0


def test_a_context_is_shifted_again_and_again(tiny_model):
    args = EngineArgs(str(tiny_model), max_model_len=64, context_shift=True, n_keep=5)
    request, held, _ = generate(args, 500)
    assert len(request.output_token_ids) == 500 and request.error is None
    assert held <= -(-64 // 16) + 2


@pytest.mark.long
@pytest.mark.network
def test_a_hundred_thousand_tokens_are_as_cheap_as_the_first(smollm2_gguf):
    """The time of a token may rise by a tenth, as the machine has other work, and memory by what
    the tokens themselves take."""
    seconds: list[float] = []
    memory: list[int] = []
    last = time.process_time()

    def watch(request: Request) -> None:
        nonlocal last
        while len(request.token_ids) > 5000 * (len(seconds) + 1):
            now = time.process_time()
            seconds.append(now - last)
            memory.append(resident_bytes())
            last = now

    args = EngineArgs("smollm2-135m", max_model_len=1024, window=252, max_num_seqs=1)
    request, held, _ = generate(args, 100_000, watch=watch)
    assert len(request.output_token_ids) == 100_000
    assert held <= SinkWindow(4, 252).most_blocks(16, 8)
    assert statistics.mean(seconds[-5:]) < 1.1 * statistics.mean(seconds[1:6])
    assert memory[-1] - memory[0] < 16 << 20
    assert len({*request.output_token_ids[-1000:]}) > 100  # it still says something
