"""Memory against what engines have logged, and octavo's against a model that is really loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.engine_profile import Limits, number_that_fits, profile, profiles
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.memory import MemoryPlan, held_bytes, memory
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.kernels.cpu.layout import experts_bytes
from octavo.models.checkpoint import open_checkpoint
from octavo.runtime.capacity import RankSpec, capacity_of, cpu_kv_bytes
from octavo.runtime.memory_ledger import CONTEXT_BYTES, logits_bytes
from octavo.settings.engine import EngineArgs, resolve

GIB = 1 << 30


def device(num_bytes: float, kind: str = "gpu") -> Device:
    return Device(name="d", kind=kind, memory_bytes=num_bytes, memory_bandwidth=1e12, peaks={})


H100, RTX4090 = device(79.18 * GIB), device(25_250_627_584)
SEVENTY = ("llama-3.3-70b", "fp8", 2)


def on(
    place: Device,
    name: str,
    quantization: str | None = None,
    tp: int = 1,
    engine: str = "vllm-0.11",
    kv: str | None = None,
    pp: int = 1,
    **limits: float,
) -> MemoryPlan:
    spec, rules = open_spec(name), profile(engine)
    precision = precision_of(spec, quantization, rules.kv_dtype(kv))
    return memory(spec, precision, Parallel(tp=tp, pp=pp), place, rules, Limits(**limits))


@pytest.mark.parametrize(
    ("case", "gib", "tolerance"),
    [
        (("llama-3.1-8b",), 14.99, 0.01),
        (("qwen3-0.6b",), 1.12, 0.01),
        (("qwen3-32b",), 61.03, 0.01),
        (("qwen3-32b", None, 2), 30.59, 0.01),
        (("llama-3.3-70b", "fp8"), 67.72, 0.01),
        (SEVENTY, 33.88, 0.01),
        (("gpt-oss-20b",), 13.47, 0.02),
        (("gpt-oss-120b",), 64.38, 0.02),
        (("llama-3.1-405b-fp8", None, 8), 57.75, 0.03),  # R11: vLLM #6746
    ],
)
def test_weights_of_a_device(case, gib, tolerance):
    """R10 and R11: measured with vLLM on H100."""
    assert on(H100, *case).weights_bytes / GIB == pytest.approx(gib, rel=tolerance)


@pytest.mark.parametrize(
    ("case", "gib"),
    [
        *((("gpt-oss-20b",), 7.38), (("gpt-oss-120b",), 7.38), (("llama-3.1-8b",), 4.76)),
        *((SEVENTY, 4.84), (("qwen3-0.6b",), 5.56), (("qwen3-32b", None, 2), 5.64)),
    ],
)
def test_activations_of_vllm(case, gib):
    """R12: with the 1,024 sequences that are the default there."""
    found = on(H100, *case).activations
    assert found.value / GIB == pytest.approx(gib, rel=0.03)
    assert found.low <= gib * GIB <= found.high


@pytest.mark.parametrize(
    ("case", "limits", "gib"),
    [
        (("llama-3.1-8b",), {}, 51.38),
        (("qwen3-0.6b",), {}, 64.45),
        (("qwen3-32b",), {}, 4.45),
        (("qwen3-32b", None, 2), {}, 34.49),
        (SEVENTY, {}, 32.00),
        (("gpt-oss-20b",), {}, 50.28),
        (("gpt-oss-120b",), {"utilization": 0.95}, 3.33),
        # What of its requests was limited is not known; the sampler of 1,024 would need 4.8 GiB.
        (("mistral-small-3.1-24b",), {"utilization": 0.95, "max_num_seqs": 256}, 28.20),
    ],
)
@pytest.mark.parametrize("engine", ["vllm-0.11", "vllm"])
def test_memory_that_vllm_has_for_keys_and_values(case, limits, gib, engine):
    """R13, end to end."""
    found = on(H100, *case, engine=engine, **limits)
    assert found.left_bytes / GIB == pytest.approx(gib, abs=max(0.6, 0.03 * gib))
    assert found.left.low <= gib * GIB <= found.left.high


def test_blocks_of_a_pool():
    """R06: 28.20 GiB for Mistral Small, in blocks of 128."""
    found = on(H100, "mistral-small-24b", block_size=128, kv_cache_memory=int(28.20 * GIB))
    assert abs(found.num_blocks - 1444) <= 1
    assert found.kv_tokens == found.num_blocks * 128
    assert found.kv_bytes == found.kv_tokens * 163_840
    blocks = -(-15_049 // 128)
    assert blocks == 118
    assert blocks / found.num_blocks == pytest.approx(0.0817, abs=1e-4)
    assert found.max_concurrency(15_049) == found.num_blocks // blocks


def test_tokens_on_a_4090():
    """R15: vLLM 0.19 has 2,588 blocks of 16."""
    found = on(RTX4090, "llama-3.1-8b", engine="vllm")
    assert found.kv_tokens == pytest.approx(41_408, rel=0.03)
    assert found.limits.max_num_seqs == 256
    assert found.limits.max_num_batched_tokens == 2048


@pytest.mark.parametrize(("utilization", "batch"), [(1.0, 13), (0.9, 11)])
def test_the_batch_that_fits(utilization, batch):
    """R42: 14 GB of weights on 80 GB, 5 GB for each sequence."""
    assert number_that_fits(utilization * 80e9 - 14e9, 5e9) == batch


def test_llama_cpp_keeps_the_embedding_beside_the_processor():
    """Its log of Llama 3.1 8B in Q4_K_M: 4403.49 MiB on the GPU, 281.81 MiB on the host, and a
    compute buffer of 258.5 MiB."""
    found = on(RTX4090, "llama-3.1-8b", "Q4_K_M", engine="llama.cpp")
    assert found.weights_bytes / 2**20 == pytest.approx(4403.49, abs=0.01)
    assert found.activations.value / 2**20 == pytest.approx(258.5, abs=0.01)
    at_home = on(device(32 * GIB, "cpu"), "llama-3.1-8b", "Q4_K_M", engine="llama.cpp")
    assert at_home.weights_bytes / 2**20 == pytest.approx(4403.49 + 281.81, abs=0.01)


def test_windows_and_states_make_room_for_more():
    full = on(H100, "gemma-3-27b", "fp8")
    assert full.max_concurrency(100_000) > 3 * (full.kv_tokens // 100_000)
    hybrid = on(H100, "qwen3.6-27b", "fp8")
    assert hybrid.max_concurrency(1) < hybrid.num_blocks  # each has a state of 150 MiB


@pytest.mark.parametrize("engine", profiles())
def test_where_nothing_is_kept_of_a_token_states_bound_how_many_there_are(engine):
    found = on(RTX4090, "mamba-2.8b", "float16", engine=engine, max_model_len=4096)
    state = 64 * 5120 * (3 + 16) * 4
    assert found.kv_bytes_per_token == 0 and found.fits
    assert found.max_concurrency(1) == found.max_concurrency(4096) == found.kv_bytes // state
    assert found.kv_tokens == 4096 * min(found.limits.max_num_seqs, found.max_concurrency(1))
    small = on(device(2 * GIB), "mamba-2.8b", "float16", engine=engine)
    assert not small.fits and small.num_blocks == 0


def test_what_does_not_fit_says_how_much_is_missing():
    found = on(RTX4090, "qwen3-32b")
    assert not found.fits
    assert found.num_blocks == found.kv_bytes == found.max_concurrency(1) == 0
    assert -found.left_bytes == pytest.approx(
        found.weights_bytes + found.kept_back_bytes - found.usable_bytes, abs=2
    )


def test_a_pipeline_has_room_for_what_its_fullest_stage_has():
    two = on(RTX4090, "qwen3-14b", pp=2)
    assert two.fits
    assert two.weights_bytes < on(RTX4090, "qwen3-14b").weights_bytes
    assert two.kv_bytes_per_token == 20 * 2 * 8 * 128 * 2


@given(
    name=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b"]),
    engine=st.sampled_from([name for name in profiles() if name != "octavo"]),
    gib=st.integers(4, 200),
    more=st.integers(0, 50),
    seqs=st.integers(1, 1024),
)
def test_more_memory_never_holds_less(name, engine, gib, more, seqs):
    spec = spec_of(name)
    found = [
        memory(
            spec,
            precision_of(spec),
            Parallel(),
            device(size * GIB),
            profile(engine),
            Limits(max_num_seqs=seqs, max_num_batched_tokens=2048),
        )
        for size in (gib, gib + more)
    ]
    assert found[0].kv_tokens <= found[1].kv_tokens
    assert found[0].max_concurrency(1000) <= found[1].max_concurrency(1000)
    for each in found:
        assert each.kv_bytes <= max(0, each.left_bytes)
        assert each.weights_bytes == found[0].weights_bytes


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"utilization": 1.5}, "utilization"),
        ({"kv_cache_memory": -1}, "negative"),
        ({"max_model_len": 1_000_000}, "131072 positions"),
    ],
)
def test_limits_that_cannot_be_are_errors(limits, what):
    with pytest.raises(ConfigError, match=what):
        on(H100, "llama-3.1-8b", **limits)


def test_an_unknown_engine_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        profile("llamacpp")
    assert profile("VLLM").name == "vllm"


# -- octavo, as it is when it is loaded -----------------------------------------------------------


def loaded(model, **settings):
    from octavo.serving.load import load_engine
    from octavo.settings.engine import EngineArgs

    return load_engine(EngineArgs(model=str(model), **settings))


def planned(path, kv=None, **limits):
    return on(device(16 * GIB, "cpu"), str(path), engine="octavo", kv=kv, **limits)


@pytest.mark.parametrize("kv", [None, "int8", "fp8", "int4"])
def test_a_tiny_model_is_as_it_was_planned(tiny_model, kv):
    engine = loaded(tiny_model, **({"kv_cache_dtype": kv} if kv else {}), max_num_seqs=3)
    try:
        plan = planned(tiny_model, kv, max_num_seqs=3)
        assert engine.info["weights_bytes"] == plan.weights_bytes
        assert engine.info["kv_blocks"] == plan.num_blocks
        probe = engine.text_engine.engine.executor.probe()
        assert probe.kv_bytes_per_token == plan.kv_bytes_per_token
    finally:
        engine.text_engine.engine.executor.close()


def test_rows_of_experts_are_counted_up_to_their_chunks():
    machine, limits = device(200 * GIB, "cpu"), {"engine": "octavo", "max_num_seqs": 1}
    few, many, more = (
        on(machine, "mixtral-8x7b", max_num_batched_tokens=tokens, **limits).activations.value
        for tokens in (256, 2048, 4096)
    )
    logits, others = 4 * 32_000, (more - many) / 2048
    assert few - logits - 256 * others == experts_bytes(4096, 14_336, 2, 256) < 33 << 20


def test_on_a_gpu_all_lines_of_the_ledger_are_kept_back():
    plan = on(RTX4090, "llama-3.1-8b", engine="octavo")
    assert plan.kept_back_bytes == pytest.approx(
        plan.activations.value + plan.non_torch_bytes + plan.graphs_bytes, abs=2
    )
    assert plan.left_bytes == pytest.approx(
        0.9 * plan.total_bytes - plan.weights_bytes - plan.kept_back_bytes, abs=2
    )
    assert plan.non_torch_bytes == CONTEXT_BYTES
    assert plan.activations.value > logits_bytes(plan.limits.max_num_seqs, 128_256)


def test_weights_that_are_loaded_are_those_of_the_tables(smollm2_gguf):
    plan = planned(smollm2_gguf)
    engine = loaded(smollm2_gguf, num_blocks=64, max_model_len=512)
    assert engine.info["weights_bytes"] == plan.weights_bytes
    assert engine.text_engine.engine.executor.probe().kv_bytes_per_token == plan.kv_bytes_per_token
    engine.text_engine.engine.executor.close()


LIVE = """
import re, sys
from octavo import LLM, SamplingParams

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

llm = LLM(sys.argv[1], max_num_seqs=1, max_num_batched_tokens=512)
before = resident()
params = SamplingParams(temperature=0, max_tokens=1)
llm.generate([[1000 + i for i in range(1000)]], params)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_process_grows_by_what_was_planned(smollm2_gguf):
    """Weights are mapped, and the pool is touched block by block: after one prompt there are all
    weights, its keys and values, and the activations of a step, and a little that no plan counts:
    Python's own records, and what is left over of pages (6.6 MB on a Xeon)."""
    result = subprocess.run(
        [sys.executable, "-c", LIVE, str(smollm2_gguf)], capture_output=True, text=True, check=True
    )
    plan = planned(smollm2_gguf, max_num_seqs=1, max_num_batched_tokens=512)
    tokens = -(-1001 // 16) * 16
    expected = plan.weights_bytes + tokens * plan.kv_bytes_per_token + plan.activations.value
    assert 0.98 * expected < int(result.stdout) < expected + (8 << 20)


# -- ranks on processors --------------------------------------------------------------------------


def on_sockets(name: str, tp: int, **limits):
    spec, (socket, _) = spec_of(name), find_device("xeon-spr")
    parallel = Parallel(tp=tp).on("cpu")
    limits = Limits(kv_cache_memory=1 << 30, **limits)
    return memory(spec, precision_of(spec), parallel, socket, profile("octavo"), limits)


def test_a_pool_is_that_of_the_rank_with_most_kv_heads():
    """9 query heads on two ranks read two of three KV heads each, on three one."""
    one, two, three = (on_sockets("smollm2-135m", tp) for tp in (1, 2, 3))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token * 2 / 3
    assert three.kv_bytes_per_token == one.kv_bytes_per_token / 3
    assert one.num_blocks < two.num_blocks < three.num_blocks


def test_ranks_have_their_parts_of_the_weights():
    one, two = (on_sockets("llama-3.1-8b", tp) for tp in (1, 2))
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, rel=1e-3)
    assert two.num_blocks == 2 * one.num_blocks


def test_ranks_have_the_pool_that_their_engine_gives_them(tiny_model):
    """Half of what is free on the machine is for the pools of all ranks together."""
    spec, free, (socket, _) = open_spec(tiny_model), 8 << 20, find_device("xeon-spr")
    rank = RankSpec(tiny_model, group=cast(Any, SimpleNamespace(rank=0, size=2)))
    config = open_checkpoint(tiny_model).config()
    capacity = capacity_of(rank, config, is_native=True, kv_memory_bytes=cpu_kv_bytes(free))
    parallel, precision = Parallel(tp=2).on("cpu"), precision_of(spec)
    weights = held_bytes(spec, precision, parallel, 0, False, 1)
    socket = replace(socket, memory_bytes=weights + free / 2)
    planned = memory(spec, precision, parallel, socket, profile("octavo"))
    assert planned.num_blocks == resolve(EngineArgs(), capacity).cache.num_blocks
    assert planned.num_blocks == (2 << 20) // (16 * planned.kv_bytes_per_token)


def test_ranks_with_requests_of_their_own_hold_as_many_times_the_tokens():
    """But for the weights of attention, which each of them has whole."""
    turin = find_device("epyc-turin")[0]
    spec = spec_of("deepseek-v2-lite")
    by_heads, by_requests = (
        memory(
            *(spec, precision_of(spec), Parallel(tp=4, dp_attention=apart).on("cpu"), turin),
            *(profile("octavo"), Limits(kv_cache_memory=1 << 30)),
        )
        for apart in (False, True)
    )
    assert by_requests.num_blocks == by_heads.num_blocks
    assert by_requests.kv_tokens == 4 * by_heads.kv_tokens
    assert by_requests.longest_sequence == by_heads.longest_sequence == by_heads.kv_tokens
    assert by_requests.max_concurrency(5000) == 4 * by_heads.max_concurrency(5000)
    assert by_requests.weights_bytes > by_heads.weights_bytes
    assert by_requests.kv_bytes_per_token == by_heads.kv_bytes_per_token
