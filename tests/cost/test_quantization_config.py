"""What configs of published checkpoints say of their weights, and what that comes to in bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.cost.catalogue import spec_of
from octavo.cost.open_spec import open_spec
from octavo.cost.precision import precision_of, weights_bytes
from octavo.cost.quantization_config import notes
from octavo.cost.spec_hf import spec_from_hf
from octavo.cost.weight_shape import WeightShape
from octavo.cost.weights import num_parameters
from octavo.planner.answer import plan

SHARED = Path(__file__).parents[3] / "shared" / "data" / "model_configs"
SHARED = SHARED if SHARED.is_dir() else Path(__file__).parents[4] / "shared/data/model_configs"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}


def of_config(**config):
    return precision_of(replace(spec_of("llama-3.1-8b"), quantization=config))


def type_name(precision, name, layer=3, part="mlp", size=128):
    return precision.type_of(WeightShape(name, part, size, size, layer=layer)).name


def written(folder, config, beside=None):
    (folder / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return open_spec(folder)


def test_what_modelopt_writes_beside_a_config_is_read(tmp_path):
    beside = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    spec = written(tmp_path, LLAMA, beside)
    plain = 2 * num_parameters(spec)
    assert precision_of(spec).name == "fp8"
    vocabulary = 2 * 2 * 1024 * 256
    layers = weights_bytes(spec, precision_of(spec)) - vocabulary
    assert layers == pytest.approx((plain - vocabulary) / 2, rel=0.03)
    assert open_spec(tmp_path / "config.json").quantization == spec.quantization


def test_layers_of_a_mixture_have_types_of_their_own():
    precision = of_config(
        quant_method="modelopt",
        quant_algo="MIXED_PRECISION",
        quantized_layers={
            "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.language_model.layers.3.mlp.up_proj": {
                "quant_algo": "W4A16_NVFP4",
                "group_size": 16,
            },
            "lm_head": {"quant_algo": "FP8"},
        },
    )
    assert type_name(precision, "self_attn.q_proj", part="attention") == "fp8"
    assert type_name(precision, "mlp.up_proj") == "nvfp4"
    assert type_name(precision, "mlp.up_proj", layer=4) == "bfloat16"
    assert type_name(precision, "lm_head", layer=None, part="head") == "fp8"
    assert precision.name == "fp8+nvfp4"


def test_all_groups_of_compressed_tensors_are_read():
    groups = {
        "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
        "b": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        },
    }
    precision = of_config(
        quant_method="compressed-tensors", config_groups=groups, ignore=["re:.*layers\\.5\\..*"]
    )
    assert type_name(precision, "self_attn.q_proj", part="attention") == "fp8"
    assert type_name(precision, "mlp.up_proj") == "int4-g32"
    assert type_name(precision, "mlp.up_proj", layer=5) == "bfloat16"
    assert type_name(precision, "lm_head", layer=None, part="head") == "bfloat16"


@pytest.mark.parametrize(
    ("pattern", "weight"),
    [
        ("model.language_model.layers.3.self_attn*", "self_attn.q_proj"),
        ("language_model.model.layers.3.self_attn", "self_attn.q_proj"),
        ("backbone.layers.3.mixer.in_proj", "mamba.in_proj_zx"),
        ("backbone.layers.3.mixer.q_proj", "self_attn.q_proj"),
        ("model.layers.3.block_sparse_moe.experts.0.w1", "mlp.experts.gate_proj"),
        ("model.layers.3.mlp.shared_experts", "mlp.shared_expert.up_proj"),
        ("re:.*shared_experts.*", "mlp.shared_expert.up_proj"),
        ("model.layers.3.self_attn.qkv_proj", "self_attn.k_proj"),
        ("model.language_model.layers.3.linear_attn.in_proj_qkv", "linear_attn.in_proj_v"),
        ("*self_attn*", "self_attn.o_proj"),
        ("model.layers.*.self_attn.o_proj", "self_attn.o_proj"),
        ("model.layers.3", "self_attn.o_proj"),
    ],
)
def test_modules_are_known_by_the_names_that_families_have(pattern, weight):
    precision = of_config(quant_method="modelopt", quant_algo="NVFP4", ignore=[pattern])
    assert type_name(precision, weight) == "bfloat16"
    assert type_name(precision, "mlp.down_proj", layer=33) == "nvfp4"


@pytest.mark.parametrize("pattern", ["mtp.layers.3*", "visual.blocks.3.mlp", "vision_tower*"])
def test_modules_of_other_parts_are_not_taken_for_those_of_the_text_model(pattern):
    precision = of_config(quant_method="modelopt", quant_algo="NVFP4", ignore=[pattern])
    assert type_name(precision, "mlp.up_proj") == "nvfp4"


def test_mlx_quantizes_embeddings_too_and_modules_by_their_names(tmp_path):
    quantization = {"group_size": 64, "bits": 4, "model.layers.1.mlp.up_proj": {"bits": 8}}
    quantization["model.layers.0.mlp.up_proj"] = False
    spec = written(tmp_path, {**LLAMA, "quantization": quantization})
    precision = precision_of(spec)
    assert type_name(precision, "model.embed_tokens", None, "embedding") == "int4-g64"
    assert type_name(precision, "mlp.down_proj", 0) == "int4-g64"
    assert type_name(precision, "mlp.up_proj", 0) == "bfloat16"
    assert type_name(precision, "mlp.up_proj", 1) == "int8-g64"
    matrix = WeightShape("mlp.down_proj", "mlp", 64, 64, layer=0)
    assert precision.num_bytes(matrix) * 8 / 64**2 == 4.5


def test_gptq_has_modules_with_bits_of_their_own():
    precision = of_config(
        quant_method="gptq",
        bits=4,
        group_size=128,
        dynamic={r"-:.*\.3\..*down.*": {}, r"+:.*\.3\..*up.*": {"bits": 8, "group_size": 32}},
    )
    assert type_name(precision, "mlp.down_proj") == "bfloat16"
    assert type_name(precision, "mlp.up_proj") == "int8-g32"
    assert type_name(precision, "mlp.up_proj", layer=4) == "int4-g128"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "NF3"},
        {"quant_method": "compressed-tensors", "config_groups": {}, "shrunk_layers": {"a": 3}},
        {"quant_method": "fp8", "weight_subblocks": 3},
        {"quant_method": "gptq", "bits": 4, "per_layer_bits": {"0": 2}},
    ],
)
def test_what_nobody_knows_of_a_quantization_is_refused(quantization):
    with pytest.raises(UnsupportedModelError, match="quant_algo|sizes of weights"):
        of_config(**quantization)


def test_a_pattern_that_is_none_is_an_error_of_the_file():
    with pytest.raises(ModelFileError, match="no regular expression"):
        of_config(quant_method="fp8", ignore=["re:("])


def test_a_pattern_that_would_never_end_takes_no_time():
    evil = "re:" + "(.*a)" * 12 + r"(\w+)+$!"
    precision = of_config(quant_method="fp8", ignore=[evil])
    assert type_name(precision, "mlp.up_proj") == "fp8"


# -- fields that nobody asked for -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_latent_size", 64),
        ("num_experts", 8),
        ("wide_head_dim", 32),
        ("block_configs", [{}, 2]),
    ],
)
def test_a_field_that_may_change_sizes_and_that_nobody_read_is_refused(name, value):
    with pytest.raises(UnsupportedModelError, match=name):
        spec_from_hf({**LLAMA, name: value})
    nested = {"model_type": "llava", "text_config": {**LLAMA, name: value}}
    with pytest.raises(UnsupportedModelError, match=name):
        spec_from_hf(nested)


def test_other_fields_are_said_not_to_have_been_read():
    spec = spec_from_hf({**LLAMA, "use_new_norm": True, "rope_theta": 1e4, "num_beams": 4})
    assert spec.notes == ("use_new_norm = True: was not read",)
    assert plan(spec, "h100-sxm").warnings == spec.notes


def test_a_name_that_says_how_a_model_is_quantized_is_held_against_its_config():
    spec = replace(spec_from_hf(LLAMA), name="Llama-9B-FP8")
    assert "the name says FP8" in notes(spec)[0]
    assert not notes(replace(spec, name="Llama-9B"))


def test_experts_may_work_on_fewer_values_than_layers_have():
    config = {
        **LLAMA,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "EE",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    }
    whole, latent = (
        num_parameters(spec_from_hf({**config, **more})) for more in ({}, {"moe_latent_size": 32})
    )
    assert whole - latent == 2 * (8 * 2 * 64 * (256 - 32) - 2 * 256 * 32)


# Published: https://huggingface.co/<name>, sizes of files; billions of parameters by their cards.
PUBLISHED = {
    "Qwen--Qwen3-32B-FP8": (32.8, 34.3),
    "moonshotai--Kimi-K2.5": (1026, 595),
    "nvidia--DeepSeek-V3.1-NVFP4": (671, 394),
    "nvidia--Gemma-4-31B-IT-NVFP4": (30.7, 31.18 * 1.0737 - 1.1),  # less what sees
    "nvidia--Llama-3.1-70B-Instruct-FP8": (70.6, 72.7),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (120.6, 69),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120.6, 241),  # its config has nothing of FP8
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (31.6, 19.4),
    "nvidia--Qwen3-235B-A22B-NVFP4": (235, 134),
    "moonshotai--Kimi-K3": (2800, 1560),
    "mlx": (8.03, 4.52),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.skipif(not SHARED.is_dir(), reason="the published configs are not here")
def test_published_checkpoints_have_their_sizes(name):
    billions, gigabytes = PUBLISHED[name]
    spec = open_spec(SHARED / name)
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, rel=0.02)
    assert weights_bytes(spec, precision_of(spec)) / 1e9 == pytest.approx(gigabytes, rel=0.04)
