"""Guards that count: they give the same answer on any machine, however busy it is.

Counts of calls differ a little between versions of Python (the measured ones are of 3.11).
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from octavo.core import lookahead
from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.cost.loaded_model import live_rank_model
from octavo.executor.simulated import SimulatedExecutor
from octavo.kernels.cpu import library
from octavo.models import footprint
from octavo.models.checkpoint import open_checkpoint
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime import native_forward

# -- the native step -----------------------------------------------------------------------------


def test_a_layer_is_five_fused_ops(native, program):
    """Threads meet after each; a sixth in 30 layers costs 30 barriers and trips through memory."""
    layers = native.loaded.model_config.num_layers
    assert layers == 30
    assert program.num_ops <= 5 * layers + 3  # 153: and the embedding, a check, the head


def test_a_step_reads_the_file_once(native):
    """Packed weights are as small as the file's: 97.1 MB of 98.4 MB, and the embedding, which is
    the head's matrix, counts once."""
    matrices = native.probe.matrices()
    read = sum(matrix.num_bytes for matrix in matrices)
    assert sum(matrix.is_head for matrix in matrices) == 1
    assert read <= 1.05 * native.info["weights_bytes"]


def test_what_a_step_will_read_is_known_before_it_is_loaded(native, smollm2_gguf):
    """Of the types in the file's table: Q4_1, and whatever else is among them."""
    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.config()
    types = footprint.weight_types(checkpoint, config)
    assert GGMLType.Q4_1 in types.values()
    kv_bytes = footprint.native_kv_bytes_per_token(config)
    planned = live_rank_model(config, footprint.matrices(config, types), kv_bytes)
    assert planned == native.rank_model


def test_a_step_is_one_native_call(native, prompts, count_native_calls):
    run = native.run(prompts(4, 8, 20))
    assert count_native_calls.calls["oct_step"] == len(run.steps)
    others = count_native_calls.calls.total() - len(run.steps)
    assert others == 0, count_native_calls.calls


def test_a_lone_stream_gets_eight_tokens_a_step(native, prompts, monkeypatch):
    """As long as eight take no longer than a reader would notice: here they take no time at all."""
    monkeypatch.setattr(lookahead, "MULTI_STEP_SECONDS", 1e9)
    run = native.run(prompts(1, 8, 65))
    assert len(run.steps) <= 10  # the prompt, one that tells how long it takes, and by eights


def calls_per_step(session, requests, count_calls) -> float:
    """Of steps that decode, from the engine's loop down to the native call, and back to deltas."""
    engine = session.loaded.text_engine
    for request in requests:
        params = SamplingParams(
            temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
        )
        engine.add(request.request_id, None, list(request.prompt_token_ids), params)
    _, done = engine.step()
    assert done is not None and done.batch.num_seqs == len(requests)
    steps = 0
    with count_calls() as calls:
        while engine.has_unfinished_requests:
            engine.step()
            steps += 1
    return calls.total / steps


# Measured: 306 and 2,641.
@pytest.mark.parametrize(("batch_size", "limit"), [(1, 330), (32, 3100)])
def test_calls_in_a_decode_step(native, prompts, count_calls, monkeypatch, batch_size, limit):
    monkeypatch.setattr(lookahead, "MULTI_STEP_SECONDS", 0.0)  # a token a step
    calls = calls_per_step(native, prompts(batch_size, 8, 33), count_calls)
    assert calls <= limit


# -- the engine without a model ------------------------------------------------------------------


def create_engine(num_blocks: int, *, prefix_caching: bool = True, **limits) -> Engine:
    """A step takes 5 ms, and 0.2 ms for each of its tokens."""
    clock = VirtualClock()
    cache = RadixPrefixCache(16) if prefix_caching else NoPrefixCache()
    scheduler = Scheduler(SchedulerConfig(**limits), BlockManager(num_blocks, 16, cache))
    executor = SimulatedExecutor(lambda batch: 0.005 + 0.0002 * batch.num_tokens, clock, num_blocks)
    return Engine(scheduler, executor, clock)


# Measured: 162 and 1,273.
@pytest.mark.parametrize(("batch_size", "limit"), [(1, 180), (32, 2100)])
def test_calls_in_a_step_of_the_engine_alone(count_calls, batch_size, limit):
    engine = create_engine(256)
    params = SamplingParams(max_tokens=65, ignore_eos=True)
    for index in range(batch_size):
        engine.add(Request(str(index), [index + 2] * 8, params, 0.0))
    engine.step()
    with count_calls() as calls:
        for _ in range(60):
            engine.step()
    per_step = calls.total / 60
    assert per_step <= limit


def replay(engine: Engine, seed: int = 0) -> dict[str, float]:
    """200 requests that arrive at random; every other one begins with one of four system prompts.

    The pool is too small for all that run together, so that some are preempted.
    """
    rng = random.Random(seed)
    systems = [[rng.randrange(1000) for _ in range(96)] for _ in range(4)]
    arrivals: list[Request] = []
    now = 0.0
    for index in range(200):
        now += rng.expovariate(40.0)
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(20, 200))]
        if index % 2:
            prompt = rng.choice(systems) + prompt
        params = SamplingParams(max_tokens=rng.randrange(10, 120), ignore_eos=True)
        arrivals.append(Request(str(index), prompt, params, now))
    steps = tokens = preempted = 0
    clock = engine.clock
    while arrivals or engine.has_unfinished_requests:
        if arrivals and not engine.has_unfinished_requests:
            clock.advance_to(arrivals[0].arrival_time)
        while arrivals and arrivals[0].arrival_time <= clock.now():
            engine.add(arrivals.pop(0))
        done = engine.step()
        steps += 1
        tokens += done.batch.num_tokens
        preempted += done.stats.num_preempted
    return {
        "steps": steps,
        "tokens": tokens,
        "preempted": preempted,
        "hits": engine.scheduler.prefix_tokens_hit,
        "seconds": clock.now(),
    }


LIMITS = {"max_num_batched_tokens": 256, "max_num_seqs": 32, "max_model_len": 512}


def check_replay(figures: dict[str, float]) -> None:
    """What the scheduler makes of that trace with 140 blocks; only a change of policy, or of the
    cache, can change any of it."""
    assert figures["steps"] <= 1300  # measured: 1,182
    assert figures["tokens"] <= 39_000  # 37,166; without a prefix cache 44,314
    assert figures["hits"] >= 6_500  # 7,296
    assert figures["preempted"] <= 12  # 6
    assert figures["seconds"] <= 14.5  # 13.4; without a prefix cache 15.5


def test_a_trace_takes_no_more_steps_than_it_did():
    check_replay(replay(create_engine(140, **LIMITS)))


# -- what a command imports ------------------------------------------------------------------------


def modules_after(code: str) -> set[str]:
    code += "; import sys; sys.stdout.write('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.splitlines()[-1].split())


# Measured: 84, 157 and 157, most of them the standard library's; with rich, they would be 400.
@pytest.mark.parametrize(
    ("command", "limit"), [("", 110), ("generate", 220), ("bench compare", 215)]
)
def test_help_imports_little(command, limit):
    modules = modules_after(f"from octavo import cli; cli.main('{command} --help'.split())")
    assert "octavo.cli" in modules and len(modules) <= limit


def test_a_first_answer_imports_what_it_needs(tiny_model):
    """A package that nothing of it needs costs every start of a process."""
    flags = ["--raw", "--prompt=a", "--max-tokens=1", "--temperature=0", "--num-blocks=8"]
    arguments = ["generate", str(tiny_model), *flags]
    modules = modules_after(f"from octavo import cli; cli.main({arguments!r})")
    assert "octavo.kernels.cpu.library" in modules
    needless = {"transformers", "huggingface_hub", "scipy", "fastapi", "pydantic", "rich", "jinja2"}
    if library.runnable():
        needless.add("torch")
    assert not needless & modules


# -- do they see anything? -------------------------------------------------------------------------


def test_they_see_a_second_native_call(native, program, prompts, count_native_calls, monkeypatch):
    step = program.step
    monkeypatch.setattr(program, "step", lambda *arguments: (step(*arguments), step(*arguments)))
    with pytest.raises(AssertionError):
        test_a_step_is_one_native_call(native, prompts, count_native_calls)


def test_they_see_a_stream_that_gets_a_token_at_a_time(native, prompts, monkeypatch):
    several = native_forward.NativeForward._run_multi_step

    def one(self, sampled, most, longest):
        return several(self, sampled, 1, longest)

    monkeypatch.setattr(native_forward.NativeForward, "_run_multi_step", one)
    with pytest.raises(AssertionError):
        test_a_lone_stream_gets_eight_tokens_a_step(native, prompts, monkeypatch)


def test_they_see_a_loop_over_all_blocks(count_calls, monkeypatch):
    """256 of them: a careless way to count what is free."""
    schedule = Scheduler.schedule

    def careless(self):
        for block in range(self.block_manager.num_blocks):
            abs(block)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", careless)
    with pytest.raises(AssertionError):
        test_calls_in_a_step_of_the_engine_alone(count_calls, 1, 160)


def test_they_see_a_lost_prefix_cache_and_a_smaller_pool():
    for num_blocks, prefix_caching in ((140, False), (110, True)):
        figures = replay(create_engine(num_blocks, prefix_caching=prefix_caching, **LIMITS))
        with pytest.raises(AssertionError):
            check_replay(figures)
