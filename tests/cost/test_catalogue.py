from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import entries, find_name, names, spec_of
from octavo.cost.precision import precision_of
from octavo.cost.weights import num_parameters


@pytest.mark.parametrize("name", names())
def test_parameters_are_those_that_were_published(name):
    entry = entries()[name]
    counted = num_parameters(spec_of(name))
    if entry.get("rounded"):
        assert counted == pytest.approx(entry["parameters"], rel=0.01)
    else:
        assert counted == entry["parameters"]


@pytest.mark.parametrize("name", names())
def test_an_entry_says_where_it_is_from_and_is_found_by_its_name(name):
    assert entries()[name]["source"]
    assert find_name(name) == name


def test_there_are_many():
    assert len(names()) >= 40


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12_879_925_248),
        ("llama-3.1-8b", 8_030_261_248),  # without experts, all of them
    ],
)
def test_active_parameters_are_those_that_a_token_meets(name, active):
    assert num_parameters(spec_of(name), active=True) == active


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("deepseek-v3", 37), ("qwen3-235b-a22b", 22), ("glm-4.5-air", 12), ("kimi-k2", 32)),
        *(("llama-4-scout-17b-16e", 17), ("granite-4.0-h-small", 9), ("phi-3.5-moe", 6.6)),
    ],
)
def test_active_parameters_are_near_those_of_model_cards(name, billions):
    """Cards round, and some leave out the embedding."""
    assert num_parameters(spec_of(name), active=True) == pytest.approx(billions * 1e9, rel=0.13)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("qwen3-32b", "qwen3-32b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("DeepSeek_V3", "deepseek-v3"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("google/gemma-3n-E4B-it", "gemma-3n-e4b"),
        ("databricks/dbrx-instruct", "dbrx-132b"),
        ("state-spaces/mamba-2.8b-hf", "mamba-2.8b"),
    ],
)
def test_names_are_found_however_they_are_written(text, name):
    assert find_name(text) == name


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("llama-3.1-9b", "llama-3.1-8b"), ("qwen3-33b", "qwen3-32b"), ("mixtrall-8x7b", "mixtral")],
)
def test_an_unknown_name_is_an_error_with_the_nearest(text, nearest):
    with pytest.raises(ConfigError, match=nearest):
        find_name(text)


def test_a_name_like_no_other_is_an_error_too():
    with pytest.raises(ConfigError, match="no model"):
        spec_of("§§§")


@pytest.mark.parametrize(
    ("text", "name", "quantization"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "int4-g128"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", "int4-g128"),
        ("nvidia/Qwen3-32B-NVFP4", "qwen3-32b", "nvfp4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4-g128"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b-fp8", "fp8"),
        ("openai/gpt-oss-20b", "gpt-oss-20b", "mxfp4"),
    ],
)
def test_names_may_end_in_how_a_model_is_quantized(text, name, quantization):
    spec = spec_of(text)
    assert spec.name == name
    assert precision_of(spec).name == quantization


def test_an_unknown_model_that_is_quantized_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="qwen3-32b"):
        spec_of("Qwen3-33B-AWQ")
