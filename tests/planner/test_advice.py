from __future__ import annotations

import re

import pytest

from octavo.cost.engine_profile import Limits
from octavo.planner import Traffic, plan


def advised(*arguments, **choices) -> dict[str, str]:
    """What is advised, and what it would bring."""
    found = plan(*arguments, **{"engine": "vllm", **choices}).advice
    assert all(each.why and each.gain for each in found)
    return {each.what: each.gain for each in found}


def test_what_does_not_fit_is_told_what_would():
    advice = advised("llama-3.1-70b", "h100-sxm", Traffic(1024, 256, concurrency=8))
    assert any(what.startswith("quantize the weights") for what in advice)
    assert any(re.match(r"use \d+ H100 SXM", what) for what in advice)
    assert all(gain.startswith("possible") for gain in advice.values())


def test_what_is_advised_does_what_it_says():
    """The gain is that of another plan, with the change made."""
    traffic = Traffic(512, 128, concurrency=4)
    gain = advised("llama-3.1-8b", "rtx4090", traffic)["quantize the weights to int4"]
    after = plan("llama-3.1-8b", "rtx4090", traffic, engine="vllm", quantization="int4")
    tpot = re.search(r"→.*TPOT ([\d.]+) ms", gain)[1]
    expected = after.service.latency().tpot.value * 1e3
    assert float(tpot) == pytest.approx(expected, rel=0.005)  # three digits


def test_nothing_is_advised_that_was_done():
    advice = advised("llama-3.1-8b", "h100-sxm", quantization="int4", kv_cache_dtype="fp8")
    assert not any("quantize" in what or "the KV cache in" in what for what in advice)


def test_speculative_decoding_is_for_few_at_once():
    """With many rows, a step is bound by arithmetic, and further rows cost what they bring."""
    few = advised("llama-3.1-8b", "a100-80-sxm", Traffic(128, 256, concurrency=1))
    many = advised("llama-3.1-8b", "a100-80-sxm", Traffic(128, 256, concurrency=512))
    assert any("speculative" in what for what in few)
    assert not any("speculative" in what for what in many)


def test_seats_are_advised_where_memory_has_room_for_more():
    traffic = Traffic(200, 100, concurrency=64)
    advice = advised("llama-3.1-8b", "h100-sxm", traffic, limits=Limits(max_num_seqs=8))
    assert "set max_num_seqs to 64" in advice


def test_prompts_that_begin_alike_are_advised_where_prompts_take_the_time():
    long, short = (
        advised("llama-3.1-8b", "l40s", Traffic(length, 200, concurrency=4))
        for length in (6000, 20)
    )
    assert any("begin with the same text" in what for what in long)
    assert not any("begin with the same text" in what for what in short)


def test_what_helps_most_comes_first():
    found = plan(
        "llama-3.1-70b", "h100-sxm:2", Traffic(512, 128, concurrency=4), engine="vllm", tp=2
    ).advice
    possible = [each.gain.startswith("possible") for each in found]
    assert possible == sorted(possible, reverse=True)


def test_a_length_that_does_not_fit_is_to_be_lowered():
    """131,072 tokens take 16 GiB, and 4,608 are asked for."""
    advice = advised("llama-3.1-8b", "rtx4090", Traffic(4096, 512))
    assert next(iter(advice)).startswith("set max_model_len to")
    fitting = advised(
        "llama-3.1-8b", "rtx4090", Traffic(4096, 512), limits=Limits(max_model_len=8192)
    )
    assert not any("max_model_len" in what for what in fitting)


def test_memory_that_is_kept_for_others_is_advised_where_it_would_do():
    """The sampler of 1,024 requests takes what the weights would need (reference case R13)."""
    advice = advised("gpt-oss-120b", "h100-sxm", Traffic(512, 128, concurrency=8))
    assert advice["set max_num_seqs to 8"].startswith("possible")
    assert advice["set gpu_memory_utilization to 0.95"].startswith("possible")
