"""Whatever a config says, it is a model or a ModelError: nothing else comes out of reading it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.base.errors import ModelError
from octavo.layers.rope_angles import inverse_frequencies
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import config_from_hf

ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
    "partial_rotary_factor": 1.0,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 32,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e4,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    "text_config": {},
    "quantization_config": {},
}
# Of these, what a family has not would be refused: see test_unread.py.
ONLY_GEMMA3 = {"hidden_activation", "query_pre_attn_scalar", "sliding_window_pattern"}
OF_WINDOWS = {"layer_types", "use_sliding_window", "max_window_layers"}


def config_of(architecture: str) -> dict[str, Any]:
    left_out = {
        "LlamaForCausalLM": ONLY_GEMMA3 | OF_WINDOWS,
        "MistralForCausalLM": ONLY_GEMMA3 | OF_WINDOWS - {"layer_types"},
        "Gemma3ForCausalLM": OF_WINDOWS - {"layer_types"},
    }.get(architecture, ONLY_GEMMA3)
    kept = {name: value for name, value in CONFIG.items() if name not in left_out}
    return {**kept, "architectures": [architecture]}


GENERATION = {
    "eos_token_id": [2, 3],
    "do_sample": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
}
METADATA = {
    "general.name": "A model",
    "ARCH.embedding_length": 64,
    "ARCH.feed_forward_length": 128,
    "ARCH.block_count": 4,
    "ARCH.attention.head_count": 8,
    "ARCH.attention.head_count_kv": np.array([2, 2, 2, 2], np.uint32),
    "ARCH.attention.key_length": 16,
    "ARCH.attention.value_length": 16,
    "ARCH.attention.scale": 0.25,
    "ARCH.attention.sliding_window": 32,
    "ARCH.attention.sliding_window_pattern": np.array([True, False, True, False]),
    "ARCH.attention.layer_norm_rms_epsilon": 1e-5,
    "ARCH.context_length": 512,
    "ARCH.vocab_size": 4,
    "ARCH.expert_count": 0,
    "ARCH.attn_logit_softcapping": 50.0,
    "ARCH.final_logit_softcapping": 30.0,
    "ARCH.rope.freq_base": 1e4,
    "ARCH.rope.freq_base_swa": 1e4,
    "ARCH.rope.dimension_count": 16,
    "ARCH.rope.scale_linear": 1.0,
    "ARCH.rope.scaling.type": "yarn",
    "ARCH.rope.scaling.factor": 4.0,
    "ARCH.rope.scaling.original_context_length": 128,
    "ARCH.rope.scaling.attn_factor": 1.0,
    "ARCH.rope.scaling.yarn_beta_fast": 32.0,
    "ARCH.rope.scaling.yarn_beta_slow": 1.0,
    "general.sampling.temp": 0.5,
    "general.sampling.top_p": 0.9,
    "general.sampling.top_k": 40,
    "tokenizer.ggml.tokens": ["a", "b", "<end_of_turn>", "d"],
    "tokenizer.ggml.token_type": np.array([1, 1, 3, 1], np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

EXTREMES = [0, 1, 2, -1, 1 << 16, 1 << 31, 1 << 63, 10**400, 0.0, 1e-320, 1e-9, 1e9, 1e308]
WORDS = ["", "x", "default", "linear", "dynamic", "yarn", "longrope", "llama3", "su", "none"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([*EXTREMES, float("inf"), float("nan"), -1e308, *WORDS])
    | st.integers()
    | st.floats()
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=9)
        | st.dictionaries(st.sampled_from([*ROPE, *CONFIG, "x"]), inner, max_size=3)
    ),
    max_leaves=9,
)
ARRAYS = st.sampled_from([np.array(values) for values in ([], [0], [1.5], [True], [-1, 2, 3, 4])])
GGUF = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from([*WORDS, 0, 1, 2, 1 << 31, 1e308, 1e-320])
    | ARRAYS
    | st.lists(st.text(max_size=3), max_size=5)
)


def paths(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The fields of a table, and of the tables in it."""
    found = []
    for key, value in table.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


def changed(table: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    if rest:
        inner = table.get(key)
        value = changed(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**table, key: value}


def check(config: ModelConfig) -> None:
    """What was let through can be worked with."""
    SamplingParams(**config.sampling_defaults)
    for rope in (config.rope, config.local_rope):
        if rope is not None and rope.rotary_dim < 10_000:
            inverse_frequencies(rope, np.arange(3))
    assert config.max_position >= 1 and len(config.layer_windows) == config.num_layers
    hash((config.eos_token_ids, config.layer_windows))


ARCHITECTURES = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(
    changes=st.lists(st.tuples(st.sampled_from(paths(CONFIG)), JSON), max_size=3),
    rope_type=st.sampled_from(WORDS),
    flat=st.booleans(),
    generation=st.lists(st.tuples(st.sampled_from(list(GENERATION)), JSON), max_size=2),
)
@settings(max_examples=120, deadline=None)
def test_config_json(architecture, changes, rope_type, flat, generation):
    config = config_of(architecture)
    if flat:
        config["rope_parameters"] = {**ROPE, "rope_type": rope_type}
    for path, value in changes:
        config = changed(config, path, value)
    try:
        found = config_from_hf(config, {**GENERATION, **dict(generation)}, path="m/config.json")
    except ModelError:
        return
    check(found)


def test_the_configs_that_are_changed_are_sound():
    for architecture in ARCHITECTURES:
        check(config_from_hf(config_of(architecture), GENERATION))
    for kind in ("llama", "qwen3", "gemma3"):
        check(gguf_config(kind, {}))


def gguf_config(kind: str, changes: dict[str, Any]) -> ModelConfig:
    metadata = {k.replace("ARCH", kind): v for k, v in {**METADATA, **changes}.items()}
    table = {"token_embd.weight": SimpleNamespace(shape=(4, 64))}
    return config_from_gguf({"general.architecture": kind, **metadata}, table, path=Path("f"))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@given(changes=st.dictionaries(st.sampled_from(list(METADATA)), GGUF, max_size=3))
@settings(max_examples=150, deadline=None)
def test_gguf_metadata(kind, changes):
    try:
        found = gguf_config(kind, changes)
    except ModelError:
        return
    check(found)
