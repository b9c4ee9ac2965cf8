"""What a file says and nobody reads is refused where it could change numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.base.errors import ModelError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import config_from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "projector_hidden_act": "gelu",
    "vision_config": {"hidden_size": 32},
    "text_config": {**LLAMA, "architectures": None, "model_type": "mistral", "head_dim": 16},
}
GGUF = {
    "embedding_length": 64,
    "feed_forward_length": 128,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 512,
}


def hf(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_hf({**config, **changes}, path="folder/config.json")


def gguf(**changes: Any) -> ModelConfig:
    entries = {f"llama.{name}": value for name, value in {**GGUF, **changes}.items()}
    tensors = {"token_embd.weight": SimpleNamespace(shape=(100, 64))}
    metadata = {"general.architecture": "llama", **entries}
    return config_from_gguf(metadata, tensors, path=Path("a.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_temperature", 0.1),
        ("use_qk_norm", True),
        ("residual_multiplier", 1.0),
        ("layer_scales", [0, 0.5]),
        ("per_layer", [{"scale": 2}]),
        ("dual_chunk_attention_config", {"chunk_size": 8}),
        ("scoring_func", "sigmoid"),
        ("num_kv_shared_layers", 1),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("is_encoder_decoder", True),
        ("quantization", {"group_size": 64, "bits": 4}),
    ],
)
def test_a_key_that_nobody_reads_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        hf(LLAMA, **{key: value})
    for words in ("folder/config.json", f"{key} = ", "LlamaForCausalLM", "take it out of the file"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_new_norm", False),
        ("num_kv_shared_layers", 0),
        ("layer_scales", []),
        ("author", "somebody"),
        ("tags", ["small", "fast"]),
        ("sliding_window", 128),
    ],
)
def test_what_says_that_something_is_off_is_a_warning(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert hf(LLAMA, **{key: value}) == hf(LLAMA)
    assert f"{key} = " in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02},
        {"_name_or_path": "x", "torch_dtype": "float16", "use_cache": True, "pad_token_id": 3},
        {"temperature": 0.5, "top_p": 0.9, "num_beams": 4},
        {"pretraining_tp": 2, "auto_map": {"AutoConfig": "a.B"}, "id2label": {"0": "a"}},
        {"rope_interleaved": False, "is_llama_config": True, "layer_types": ["full_attention"] * 2},
        {"rope_scaling": {**YARN, "type": "yarn", "low_freq_factor": 1.0, "finetuned": True}},
        {"anything_at_all": None},
    ],
)
def test_what_means_nothing_is_passed_over(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        hf(LLAMA, **changes)
    assert not caplog.text


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
def test_tables_of_rope_are_looked_into(table: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{table}\.llama_4_scaling_beta = 0\.1"):
        hf(LLAMA, **{table: {**YARN, "llama_4_scaling_beta": 0.1}})
    by_type = {"full_attention": YARN, "sliding_attention": {**YARN, "alpha": 2.0}}
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    with pytest.raises(UnsupportedModelError, match=rf"{table}\.sliding_attention\.alpha = 2\.0"):
        hf(gemma, **{table: by_type})
    with pytest.raises(UnsupportedModelError, match=rf"{table}\.chunked_attention"):
        hf(gemma, **{table: {"full_attention": YARN, "chunked_attention": YARN}})


def test_two_tables_of_rope_must_agree() -> None:
    assert hf(LLAMA, rope_scaling=YARN, rope_parameters=YARN) == hf(LLAMA, rope_scaling=YARN)
    with pytest.raises(ModelError, match="rope_scaling.*something else than rope_parameters"):
        hf(LLAMA, rope_scaling=YARN, rope_parameters={**YARN, "factor": 2.0})


def test_the_text_part_is_of_the_kind_that_the_architecture_is() -> None:
    assert hf(MISTRAL3).architecture == "MistralForCausalLM"
    ministral = {**MISTRAL3["text_config"], "model_type": "ministral3"}
    with pytest.raises(UnsupportedModelError, match=r"text_config\.model_type is 'ministral3'"):
        hf(MISTRAL3, text_config=ministral)
    with pytest.raises(UnsupportedModelError, match="model_type is 'qwen2'"):
        hf(LLAMA, model_type="qwen2")
    assert hf(LLAMA, model_type=None) == hf(LLAMA)


def test_the_text_part_is_looked_into() -> None:
    text = {**MISTRAL3["text_config"], "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    place = r"text_config\.rope_parameters\.llama_4_scaling_beta = 0\.1"
    with pytest.raises(UnsupportedModelError, match=place):
        hf(MISTRAL3, text_config=text)
    with pytest.raises(UnsupportedModelError, match=r"config\.json: logit_temperature = 2"):
        hf(MISTRAL3, logit_temperature=2)
    hf(MISTRAL3, vision_feature_layer=-1, image_size=7, spatial_merge_size=2)


@pytest.mark.parametrize(
    "key", ["attention.temperature_scale", "attention.temperature_length", "rope.scaling.x"]
)
def test_metadata_of_gguf_files(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"a\.gguf: llama\.{key} = 2"):
        gguf(**{key: 2})
    gguf(**{"attention.causal": True, "tensor_data_layout": "Meta AI original pth"})


def test_metadata_that_says_that_something_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gguf(**{"attention.temperature_scale": 0.0})
    assert "llama.attention.temperature_scale" in caplog.text
