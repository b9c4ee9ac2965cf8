"""Logits with an adapter are those of merged weights, in all families: whatever is fused, reordered
or split on the way from a folder to the kernels, the changes of modules are too."""

from __future__ import annotations

import math
import shutil
from functools import cache

import pytest
import tiny_hybrids
from made_adapters import linear_modules, merged_by_hand, write_adapter

from octavo import LLM, LoRARequest, SamplingParams

PROMPT = [5, 100, 33, 240, 77, 12, 190, 8, 64, 201, 150, 3]
ONE_OF_EACH_KIND = (
    "llama-tied",
    "phi3",
    "gpt2",
    "gemma3",
    "olmo2",
    "qwen2",
    "deepseek-v2",
    "hybrid:qwen3-next",
)
OTHERS = (
    *("mistral", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "olmoe", "granite-moe"),
    *("gpt-oss", "deepseek-v3", "gemma2", "granite", "olmo3", "smollm3", "glm4", "cohere2"),
    *("starcoder2", "opt", "hybrid:lfm2", "hybrid:falcon", "hybrid:granite"),
)


def logprobs(model, kernels, lora_request=None):
    """The log-probabilities of the likeliest tokens at each position of a prompt, and of its
    answer."""
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=20, prompt_logprobs=20, ignore_eos=True
    )
    with LLM(
        str(model),
        kernels=kernels,
        kv_cache_dtype="f32",
        max_model_len=32,
        num_blocks=16,
        threads=1,
    ) as llm:
        (output,) = llm.generate([PROMPT], params, lora_request=lora_request)
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]


def distance(rows, others) -> float:
    """The largest difference, and infinity where other tokens are likely."""
    pairs = list(zip(rows, others, strict=True))
    if any(len(row.keys() & other.keys()) < 19 for row, other in pairs):
        return math.inf
    return max(abs(row[key] - other[key]) for row, other in pairs for key in row.keys() & other)


@pytest.fixture(scope="module")
def folder_of(tiny_hf, tiny_model, tmp_path_factory):
    """The folder of a tiny model; ``hybrid:name`` is one of tiny_hybrids."""

    @cache
    def folder(name):
        kind, _, of_hybrids = name.partition(":")
        if not of_hybrids:
            return tiny_hf(kind)
        path = tmp_path_factory.mktemp("hybrids") / of_hybrids
        ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
        tiny_hybrids.make_model(of_hybrids, **ids).save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_model / file, path / file)
        return path

    return folder


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    "name", [*ONE_OF_EACH_KIND, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_logits_are_those_of_merged_weights(name, kernels, folder_of, tmp_path):
    model = folder_of(name)
    adapter = write_adapter(tmp_path / "a", model, rank=5, modules=linear_modules(model))
    merged = merged_by_hand(tmp_path / "merged", model, adapter)
    expected = logprobs(merged, kernels)
    got = logprobs(model, kernels, LoRARequest("a", 1, str(adapter)))
    assert distance(got, expected) < 1e-4
    assert distance(got, logprobs(model, kernels)) > 1e-2
