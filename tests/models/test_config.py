"""Configs in all their spellings, and those that cannot be."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from octavo import SamplingParams
from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import config_from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def hf(architecture="LlamaForCausalLM", generation=None, **changes):
    config = {**LLAMA, "architectures": [architecture], **changes}
    return config_from_hf(config, generation, path="folder/config.json")


def test_absent_fields_of_a_small_config():
    config = hf()
    assert (config.name, config.architecture) == ("folder", "LlamaForCausalLM")
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (8, 8, 2048)
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.scaling) == (1e4, 8, "default")
    assert config.attention_scale == 8**-0.5 and config.activation == "silu"
    assert config.layer_windows == (None,) * 4 and config.eos_token_ids == (2,)
    assert not config.tie_embeddings and not config.qk_norm and not config.attention_bias
    assert config.embedding_scale is None and config.sampling_defaults == {}


def test_null_is_absent():
    assert hf(head_dim=None, num_key_value_heads=None, rope_scaling=None, bos_token_id=None) == hf()


@pytest.mark.parametrize(
    "new, old",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"rope_theta": 5.0}),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5},
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 512,
                }
            },
            {
                "rope_scaling": {"type": "yarn", "factor": 2},
                "original_max_position_embeddings": 512,
            },
        ),
    ],
)
def test_rope_spellings(new, old):
    assert hf(**new) == hf(**old)
    assert hf(**new).rope != hf().rope


def test_contexts_that_scaling_extends():
    def longest(**scaling):
        return hf(max_position_embeddings=1000, rope_scaling=scaling).max_position

    assert longest(rope_type="linear", factor=4) == 1000
    assert longest(rope_type="dynamic", factor=4) == 4000
    assert longest(rope_type="yarn", factor=4) == 4000
    assert longest(rope_type="yarn", factor=4, original_max_position_embeddings=250) == 1000


def test_windows_by_family():
    sizes = {"sliding_window": 32}
    assert hf(**sizes).layer_windows == (None,) * 4  # Llama has none, whatever is left over
    assert hf("MistralForCausalLM", **sizes).layer_windows == (32,) * 4
    assert hf("MistralForCausalLM", sliding_window=None).layer_windows == (None,) * 4
    assert hf("Qwen2ForCausalLM", **sizes, max_window_layers=0).layer_windows == (None,) * 4
    qwen = {**sizes, "use_sliding_window": True}
    windows = hf("Qwen2ForCausalLM", **qwen, max_window_layers=3).layer_windows
    assert windows == (None, None, None, 32)
    types = ["full_attention", "sliding_attention"] * 2
    assert hf("Qwen3ForCausalLM", **qwen, layer_types=types).layer_windows == (None, 32) * 2
    gemma = {**sizes, "sliding_window_pattern": 2}
    assert hf("Gemma3ForCausalLM", **gemma).layer_windows == (32, None) * 2


def test_biases_by_family():
    def biases(*args, **kwargs):
        config = hf(*args, **kwargs)
        return config.attention_bias, config.attention_output_bias

    assert biases(attention_bias=True) == (True, True)
    assert biases("Qwen2ForCausalLM") == (True, False)
    assert biases("Qwen3ForCausalLM") == (False, False)
    assert hf("Qwen3ForCausalLM").qk_norm and not hf("Qwen2ForCausalLM").qk_norm


def test_gemma3_names_only_what_differs():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
        },
        {"eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95, "do_sample": True},
    )
    assert config.architecture == "Gemma3ForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262_208, 131_072)
    assert config.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert (config.rope.theta, config.rope.scaling, config.rope.factor) == (1e6, "linear", 8)
    assert (config.local_rope.theta, config.local_rope.scaling) == (1e4, "default")
    assert config.tie_embeddings and config.norm_plus_one and config.activation == "gelu_tanh"
    assert config.embedding_scale == math.sqrt(2560) and config.attention_scale == 1 / 16
    assert config.eos_token_ids == (1, 106)
    assert config.sampling_defaults == {"top_k": 64, "top_p": 0.95}


def test_end_tokens_and_sampling_of_both_files():
    config = hf(
        eos_token_id=[7, 2],
        generation={"eos_token_id": [9, 7], "temperature": 0.6, "min_p": True, "seed": 3},
    )
    assert config.eos_token_ids == (9, 7, 2)
    assert config.sampling_defaults == {"temperature": 0.6}
    assert hf(generation={"do_sample": False, "temperature": 0.6}).sampling_defaults == {}


@pytest.mark.parametrize(
    "name, value",
    [
        ("top_p", 0),
        ("top_p", "0.9"),
        ("top_p", [0.9]),
        ("temperature", float("nan")),
        ("temperature", -0.5),
        ("temperature", {"a": "x" * 10**6}),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", float("inf")),
    ],
)
def test_recommendations_that_no_request_could_have_are_left_out(name, value, caplog):
    good = {"top_k": 40, "temperature": 0.5, name: value}
    defaults = hf(generation=good).sampling_defaults
    assert name not in defaults and defaults == {n: good[n] for n in defaults}
    SamplingParams(**defaults)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and len(record.getMessage()) < 400
    assert f"folder/generation_config.json ({name}): {name}: must be" in record.getMessage()


def test_gguf_recommendations(caplog):
    found = {"general.sampling.temp": 0.7, "general.sampling.top_p": 0.0}
    assert gguf_config(**found).sampling_defaults == {"temperature": 0.7}
    assert "file.gguf (general.sampling.top_p)" in caplog.text


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e12}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e-12}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e12}}, "factor"),
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"sliding_attention": "abc"}}, "sliding_attention"),
        ({"rope_parameters": {"full_attention": [1]}}, "full_attention"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"text_config": "x"}, "text_config"),
        ({"architectures": [7]}, "architectures[0]"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"max_position_embeddings": 1}, "max_position_embeddings"),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_type",
        ),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": 1000}, "eos_token_id"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id[1]"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
)
def test_impossible_values_name_their_field(changes, field):
    with pytest.raises(ModelFileError) as caught:
        config_from_hf({**LLAMA, **changes})
    assert caught.value.field == field


def test_layer_types_must_match_the_layers():
    for types, said in ((["full_attention"], "4 entries"), ("full_attention", "not a list")):
        with pytest.raises(ModelFileError, match=said):
            hf("Gemma3ForCausalLM", layer_types=types)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM.*not MambaForCausalLM"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"type": "proportional"}}, "proportional"),
    ],
)
def test_what_octavo_does_not_have(changes, said):
    with pytest.raises(UnsupportedModelError, match=said):
        config_from_hf({**LLAMA, **changes})


def test_code_in_a_config_is_not_looked_at():
    auto_map = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
    assert hf(auto_map=auto_map, trust_remote_code=True) == hf()


# GGUF ---------------------------------------------------------------------------------------------


def gguf_config(kind="llama", tensors=(), drop=(), **changes):
    metadata = {
        "general.architecture": kind,
        "general.name": "A model",
        f"{kind}.embedding_length": 64,
        f"{kind}.feed_forward_length": 128,
        f"{kind}.block_count": 12,
        f"{kind}.attention.head_count": 8,
        f"{kind}.attention.head_count_kv": 2,
        f"{kind}.context_length": 4096,
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {key.replace("ARCH", kind): value for key, value in changes.items()}
    table = {"token_embd.weight": SimpleNamespace(shape=(1000, 64))}
    table |= {name: SimpleNamespace(shape=(1,)) for name in tensors}
    for name in drop:
        metadata.pop(name, None)
        table.pop(name, None)
    return config_from_gguf(metadata, table, path="file.gguf")


def test_gguf_llama():
    config = gguf_config()
    assert (config.name, config.architecture) == ("A model", "LlamaForCausalLM")
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (1000, 8, 2)
    assert config.rope.interleaved and config.rope.theta == 1e4
    assert config.tie_embeddings and not gguf_config(tensors=["output.weight"]).tie_embeddings
    assert config.eos_token_ids == (2,)


def test_gguf_switches_follow_the_tensors():
    names = ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "rope_freqs.weight"]
    config = gguf_config("qwen3", names)
    assert config.attention_bias and config.qk_norm and config.rope.has_freq_factors
    assert not config.attention_output_bias and not config.rope.interleaved


def test_gguf_gemma3():
    config = gguf_config("gemma3", **{"ARCH.attention.sliding_window": 512})
    assert config.layer_windows == ((512,) * 5 + (None,)) * 2
    assert config.local_rope is None  # that of all layers has its theta, where nothing is said
    assert not config.norm_plus_one and config.embedding_scale == 8
    full = gguf_config("gemma3", **{"ARCH.rope.freq_base": 1e6})
    assert (full.rope.theta, full.local_rope.theta) == (1e6, 1e4)
    largest = gguf_config("gemma3", **{"ARCH.block_count": 62, "ARCH.attention.key_length": 32})
    assert largest.attention_scale == 8**-0.5  # hidden size over heads, in the 27B alone


def test_gguf_rope_scaling():
    linear = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    assert (gguf_config(**linear).rope.scaling, gguf_config(**linear).rope.factor) == ("linear", 4)
    assert gguf_config(**{"ARCH.rope.scale_linear": 4.0}).rope == gguf_config(**linear).rope
    yarn = gguf_config(
        **{
            "ARCH.rope.scaling.type": "yarn",
            "ARCH.rope.scaling.factor": 4.0,
            "ARCH.rope.scaling.original_context_length": 4096,
        }
    )
    assert yarn.max_position == 16_384
    assert yarn.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_gguf_end_tokens():
    config = gguf_config(
        **{
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.tokens": ["a", "<end_of_turn>", "</s>", "<|im_end|>"],
            "tokenizer.ggml.token_type": [1, 3, 3, 1],
        }
    )
    assert config.eos_token_ids == (2, 5, 1)  # the last one is ordinary text


@pytest.mark.parametrize(
    "kind, changes, drop, field",
    [
        ("llama", {}, ["general.architecture"], "general.architecture"),
        ("llama", {}, ["llama.block_count"], "llama.block_count"),
        ("llama", {"ARCH.block_count": 0}, [], "llama.block_count"),
        ("llama", {"ARCH.block_count": 1 << 30}, [], "llama.block_count"),
        ("llama", {"ARCH.attention.head_count": "8"}, [], "llama.attention.head_count"),
        ("llama", {"ARCH.attention.head_count": ["x"]}, [], "llama.attention.head_count[0]"),
        ("llama", {"ARCH.attention.head_count": [8.5]}, [], "llama.attention.head_count[0]"),
        ("llama", {"general.architecture": ["llama"]}, [], "general.architecture"),
        ("llama", {"general.name": 5}, [], "general.name"),
        ("llama", {"tokenizer.ggml.tokens": 7}, [], "tokenizer.ggml.tokens"),
        ("llama", {"ARCH.rope.scaling.type": 3}, [], "llama.rope.scaling.type"),
        ("llama", {"ARCH.rope.freq_base": 0.5}, [], "llama.rope.freq_base"),
        (
            "llama",
            {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 1e17},
            [],
            "llama.rope.scaling.factor",
        ),
        (
            "gemma3",
            {"ARCH.attention.sliding_window_pattern": ["x"] * 12},
            [],
            "gemma3.attention.sliding_window_pattern[0]",
        ),
        ("llama", {"ARCH.vocab_size": 1001}, [], "llama.vocab_size"),
        ("llama", {"tokenizer.ggml.tokens": ["a"] * 1001}, [], "tokenizer.ggml.tokens"),
        ("llama", {}, ["token_embd.weight"], None),
        (
            "gemma3",
            {"ARCH.attention.sliding_window_pattern": [1]},
            [],
            "gemma3.attention.sliding_window_pattern",
        ),
    ],
)
def test_gguf_impossible_values(kind, changes, drop, field):
    with pytest.raises(ModelFileError) as caught:
        gguf_config(kind, drop=drop, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "kind, changes, said",
    [
        ("mamba", {}, "llama.*not mamba"),
        ("qwen2", {"ARCH.expert_count": 8}, "a Qwen2ForCausalLM has no experts"),
        ("llama", {"ARCH.rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"ARCH.attention.head_count_kv": [1, 2]}, "differs"),
    ],
)
def test_gguf_what_octavo_does_not_have(kind, changes, said):
    with pytest.raises(UnsupportedModelError, match=said):
        gguf_config(kind, **changes)


def test_longrope_says_what_short_sequences_get():
    longrope = {
        "type": "longrope",
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = hf(rope_scaling=longrope)
    assert "--max-model-len 128" in config.length_note
    assert config.for_length(129).length_note == config.length_note
    assert config.for_length(128).length_note is None
    assert hf(rope_scaling={**longrope, "long_factor": [1.0] * 4}).length_note is None
    assert hf().length_note is None
