"""Whole engines on a GPU; and the same on the CPU by the twin of its kernels, so that these tests
are known to work where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.bench.gpu.checks import agreement
from octavo.bench.gpu.random_model import FORMATS, SHAPES, write_random_model

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = pytest.param("cuda", marks=on_gpu)
gpu_alone = pytest.mark.parametrize("settings", [ON_GPU], indirect=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
PROMPTS = [[3 + i, 17, 40 + 2 * i, 5, 99, 7][: 3 + i % 4] * (1 + 3 * i) for i in range(9)]


@pytest.fixture(params=["cpu", ON_GPU])
def settings(request) -> dict[str, Any]:
    """Of an engine that runs fused steps."""
    dtype = "float32" if request.param == "cpu" else "bfloat16"
    return {
        "device": request.param,
        "dtype": dtype,
        "kernels": "fused",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_blocks": 96,
    }


@contextmanager
def loaded(model: Any, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(model), **settings)
    try:
        yield llm
    finally:
        llm.close()


def answers(model: Any, params: SamplingParams, **settings: Any) -> list[list[int]]:
    with loaded(model, **settings) as llm:
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_the_reference_ops(tmp_path, settings, format):
    write_random_model(tmp_path / "model", SHAPES["tiny"], format)
    found = agreement(str(tmp_path / "model"), settings)
    assert found["kernels"] == "fused"
    # In bfloat16 some of 24 bits are gone after each op; products of FP8 round activations too.
    assert found["largest_difference"] < (1e-3 if settings["device"] == "cpu" else 0.15)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_the_reference_ops(tiny_model, settings, params):
    """In float32, where rounding does not decide."""
    settings |= {"dtype": "float32"}
    reference = {**settings, "kernels": "reference"}
    assert answers(tiny_model, params, **settings) == answers(tiny_model, params, **reference)


@gpu_alone
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_captured_steps_are_steps(tiny_model, settings, params):
    settings |= {"dtype": "float32"}
    eager = answers(tiny_model, params, enforce_eager=True, **settings)
    assert answers(tiny_model, params, **settings) == eager


def test_steps_in_flight_change_no_answer(tiny_model, settings):
    settings |= {"dtype": "float32"}
    two = answers(tiny_model, SEEDED, **settings)
    assert answers(tiny_model, SEEDED, async_scheduling=False, **settings) == two


def test_company_changes_no_bit(tiny_model, settings):
    """Log-probabilities alone, and among others that are longer."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def logprobs(llm: LLM, prompts: list[list[int]]) -> list[float]:
        answer = llm.generate(prompts, params)[0].outputs[0]
        steps = zip(answer.token_ids, answer.logprobs, strict=True)
        return [step[token].logprob for token, step in steps]

    settings |= {"batch_invariant": True, "enable_prefix_caching": False}
    with loaded(tiny_model, **settings) as llm:
        assert logprobs(llm, PROMPTS[:1]) == logprobs(llm, PROMPTS)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_coded_keys_and_values(tiny_model, settings, dtype):
    settings |= {"dtype": "float32", "kv_cache_dtype": dtype}
    reference = {**settings, "kernels": "reference"}
    assert answers(tiny_model, GREEDY, **settings) == answers(tiny_model, GREEDY, **reference)


@gpu_alone
def test_nothing_is_compiled_once_an_engine_has_started(tiny_model, settings, monkeypatch):
    """``tests/kernels/cuda/test_warm_up.py`` says the same of more kinds of requests."""
    from triton import knobs

    compiled: list[str] = []
    with loaded(tiny_model, **settings) as llm:
        monkeypatch.setattr(
            knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["repr"])
        )
        llm.generate(PROMPTS, GREEDY)
        llm.generate(PROMPTS, SamplingParams(top_p=0.9, repetition_penalty=1.2, logprobs=2))
    assert compiled == []


@gpu_alone
def test_memory_is_what_the_ledger_says(tiny_model, settings):
    """Without a size of the pool: it takes what the ledger leaves, and no step needs more."""
    del settings["num_blocks"]
    with loaded(tiny_model, **settings) as llm:
        ledger = llm.engine_info()["memory"]
        before = torch.cuda.memory_reserved()
        llm.generate(PROMPTS, GREEDY)
        free, total = torch.cuda.mem_get_info()
        assert torch.cuda.memory_reserved() - before < 256 << 20
        assert total - free <= ledger["usable_bytes"] + (256 << 20)
