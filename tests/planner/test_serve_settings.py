"""What is saved of a plan is what a server can be started with, or an error that says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.engine_profile import Limits
from octavo.cost.open_spec import open_spec
from octavo.planner import Traffic, plan
from octavo.planner.serve_settings import serve_settings, summary
from octavo.settings.engine import EngineArgs

TURIN = "epyc-turin"
LIMITS = Limits(max_num_seqs=12, max_num_batched_tokens=256, max_model_len=128, block_size=32)


def saved(model, hardware=TURIN, **choices) -> dict:
    found = serve_settings(plan(str(model), hardware, Traffic(64, 16, concurrency=4), **choices))
    assert all(each.why for each in found)
    return {each.name: each.value for each in found}


def test_all_that_was_planned_is_a_setting(tiny_model):
    found = saved(tiny_model, tp=2, kv_cache_dtype="int8", limits=LIMITS)
    assert found == {
        "model": str(tiny_model.resolve()),
        "tensor_parallel_size": 2,
        "data_parallel_size": 1,
        "device": "cpu",
        "kv_cache_dtype": "int8",
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "max_model_len": 128,
        "block_size": 32,
    }


def test_the_settings_are_those_of_the_engine(tiny_model):
    found = saved(tiny_model, tp=2, limits=LIMITS)
    args = EngineArgs.from_kwargs(**found)
    assert args.given_settings() == {k: v for k, v in found.items() if k != "model"}


def test_stages_and_ranks_and_replicas_at_once(tiny_model):
    found = saved(tiny_model, f"{TURIN}:8", tp=2, pp=2)
    assert found["tensor_parallel_size"] == found["pipeline_parallel_size"] == 2
    assert found["data_parallel_size"] == 2


def test_replicas_and_copies_are_one_number():
    assert saved("llama-3.1-8b", "h100-sxm:8", tp=1)["data_parallel_size"] == 8
    assert saved("llama-3.1-8b", "h100-sxm:8", dp=2)["data_parallel_size"] == 8


def test_replicas_for_prompts_are_saved(tiny_model):
    found = plan(str(tiny_model), f"{TURIN}:3", Traffic(64, 16, concurrency=4), tp=1)
    settings = {each.name: each.value for each in serve_settings(found, num_prefill=1)}
    assert (settings["data_parallel_size"], settings["prefill_replicas"]) == (3, 1)
    with pytest.raises(ConfigError, match="prefill_replicas"):
        serve_settings(found, num_prefill=3)


def test_this_machine_needs_no_device(tiny_model, monkeypatch):
    from octavo.cost import find_device

    known = find_device.named_device(TURIN, None)
    here = replace(known, is_measured=True, num_cores=8)
    monkeypatch.setattr("octavo.cost.this_machine.this_machine", lambda: here)
    assert "device" not in saved(tiny_model, "auto")
    assert saved(tiny_model, "auto", dp=2)["data_parallel_size"] == 2  # which share it
    with pytest.raises(ConfigError, match="auto:2 is several machines"):
        saved(tiny_model, "auto:2", tp=1)


def test_a_name_of_the_catalogue_is_fetched_from_where_it_was_published():
    assert saved("llama-3.1-8b", "h100-sxm")["model"] == "meta-llama/Llama-3.1-8B"
    assert saved("smollm2-135m")["model"] == "smollm2-135m"  # octavo's own name


def test_a_context_that_does_not_fit_is_as_long_as_it_can_be():
    assert saved("llama-3.1-8b", "rtx4090")["max_model_len"] == "auto"
    assert saved("llama-3.1-8b", "h100-sxm")["max_model_len"] == 131_072


def test_what_was_asked_of_memory_is_kept(tiny_model):
    found = saved(tiny_model, limits=Limits(kv_cache_memory=1 << 28, utilization=0.5))
    assert (found["kv_cache_memory"], found["gpu_memory_utilization"]) == (1 << 28, 0.5)


@pytest.mark.parametrize(
    ("model", "hardware", "choices", "message"),
    [
        ("llama-3.1-70b", "h100-sxm", {}, "not feasible"),
        ("llama-3.1-8b", "h100-sxm", {"engine": "vllm"}, "leave out --profile"),
        ("llama-3.1-8b", "m2-max", {}, "does not run on M2 Max"),
        ("llama-3.1-8b", "h100-sxm:2", {"pp": 2}, "native CPU kernels.*choose --tp 1 --pp 1"),
        ("llama-3.1-8b", "h100-sxm", {"quantization": "fp8"}, "octavo quantize"),
        ("llama-3.1-8b", "h100-sxm", {"dtype": "float32"}, "without.*--dtype"),
        ("llama-3.1-8b", TURIN, {"kv_cache_dtype": "q8_0"}, "choose --kv-cache-dtype among f32"),
    ],
)
def test_what_cannot_be_served_so_is_said(model, hardware, choices, message):
    with pytest.raises(ConfigError, match=message):
        saved(model, hardware, **choices)


def test_a_shape_has_nothing_to_serve(tmp_path, tiny_model):
    with pytest.raises(ConfigError, match="a shape has no weights"):
        serve_settings(plan(open_spec("smollm2-135m"), TURIN))
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    for alone in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match="has no weights to serve"):
            saved(alone)


def test_the_summary_has_the_figures_of_the_plan():
    found = plan("llama-3.1-8b", "h100-sxm:2", Traffic(512, 128, rate=3), tp=1)
    text = " ".join(summary(found))
    assert "2 x H100 SXM (2 replicas)" in text and "3 a second" in text
    assert f"{found.service.latency().ttft.value * 1e3:.3g} (" in text


def test_ranks_with_requests_of_their_own_are_a_setting():
    found = saved("deepseek-v2-lite", tp=2, ep=2, dp_attention=True, limits=LIMITS)
    assert found["enable_dp_attention"] is found["enable_expert_parallel"] is True
    assert EngineArgs.from_kwargs(**found).enable_dp_attention
