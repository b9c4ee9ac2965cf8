from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.precision import precision_of, quantizations, weights_bytes
from octavo.cost.weight_shape import WeightShape
from octavo.cost.weight_type import WeightType
from octavo.cost.weights import num_parameters, weights

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("bfloat16", 16), ("float32", 32), ("int4", 4 + 16 / 128 + 4 / 128)),
        *(("int4-g32", 4 + 20 / 32), ("mxfp4", 4.25), ("nvfp4", 4.5), ("nf4", 4.5)),
        *(("fp8", 8 + 32 / 4096), ("fp8-block", 8 + 32 / 128**2), ("int8", 8 + 32 / 4096)),
        *(("Q8_0", 8.5), ("Q6_K", 6.5625), ("Q4_0", 4.5)),
    ],
)
def test_bits_of_a_matrix_count_its_scales(name, bits):
    precision = precision_of(spec_of("mixtral-8x7b"), name)
    matrix = WeightShape("mlp.experts.up_proj", "experts", 4096, 4096, layer=20)
    assert precision.num_bytes(matrix) * 8 / matrix.num_params == pytest.approx(bits, rel=1e-12)


def test_groups_that_do_not_come_out_even_have_a_scale_each():
    codes = WeightType("int4", 4, "fp16", 2.5, 1, 128)
    assert codes.num_bytes(10, 129) == 10 * 129 / 2 + 10 * 2 * 2.5
    assert WeightType("fp8", 8, "fp8", 4.0, 128, 128).num_bytes(129, 129) == 129 * 129 + 4 * 4
    assert WeightType("fp8", 8, "fp8", 4.0, 0, 0).num_bytes(100, 100) == 100 * 100 + 4


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "gptq", "awq", "nvfp4", "nf4"])
def test_embeddings_head_norms_and_routers_stay_as_they_were(name):
    spec = spec_of("mixtral-8x7b")
    precision = precision_of(spec, name)
    for weight in weights(spec):
        is_quantized = precision.type_of(weight).name not in ("bfloat16", "float16")
        assert is_quantized == (
            weight.inputs > 0 and weight.part in ("attention", "mlp", "experts")
        ), weight


def test_mxfp4_is_of_experts_alone():
    spec = spec_of("gpt-oss-20b")
    types = {w.part: precision_of(spec).type_of(w).name for w in weights(spec) if w.inputs}
    assert types.pop("experts") == "mxfp4"
    assert set(types.values()) == {"bfloat16"}


@pytest.mark.parametrize(
    ("model", "quantization", "gib", "tolerance"),
    [
        ("llama-3.1-8b", None, 14.99, 0.01),
        ("qwen3-0.6b", None, 1.12, 0.01),
        ("qwen3-32b", None, 61.03, 0.01),
        ("llama-3.3-70b", "fp8", 67.72, 0.01),
        # https://github.com/ggml-org/llama.cpp logs 281.81 MiB of it on the host, 4403.49 beside.
        ("llama-3.1-8b", "Q4_K_M", 4685.30 / 1024, 2e-6),
    ],
)
def test_models_take_what_engines_have_measured(model, quantization, gib, tolerance):
    """R10: vLLM on H100, as llm-d-planner measured it."""
    spec = spec_of(model)
    total = weights_bytes(spec, precision_of(spec, quantization))
    assert total / GIB == pytest.approx(gib, rel=tolerance)


def test_mixes_have_the_bits_that_files_have():
    spec = spec_of("llama-2-70b")
    for name, bits in (("Q4_K_M", 4.85), ("Q8_0", 8.5), ("Q2_K", 3.0)):
        found = weights_bytes(spec, precision_of(spec, name)) * 8 / num_parameters(spec)
        assert found == pytest.approx(bits, rel=0.04), name


def test_what_makes_keys_and_values_of_latents_has_16_bits_in_files():
    """As octavo writes them; of a large model that is next to nothing."""
    spec = spec_of("deepseek-v3")
    latents = [weight for weight in weights(spec) if weight.name == "self_attn.kv_b_proj"]
    assert len(latents) == spec.num_layers
    for name, bits in (("Q4_K_M", 16), ("Q8_0", 16), ("Q2_K", 16), ("F32", 32)):
        precision = precision_of(spec, name)
        assert {precision.type_of(weight).bits for weight in latents} == {bits}
    share = sum(weight.num_params for weight in latents) / num_parameters(spec)
    assert 0.001 < share < 0.002


def of_config(**config):
    return precision_of(replace(spec_of("llama-3.1-8b"), quantization=config))


def type_name(precision, name="mlp.up_proj", layer=3):
    return precision.type_of(WeightShape(name, "mlp", 128, 128, layer=layer))


def test_a_quantization_config_is_read():
    block = type_name(of_config(quant_method="fp8", weight_block_size=[64, 128]))
    assert (block.block_outputs, block.block_inputs) == (64, 128)
    gptq = type_name(of_config(quant_method="gptq", bits=4, group_size=32))
    assert gptq.num_bytes(1, 32) == 16 + 2.5
    whole = type_name(of_config(quant_method="gptq", bits=8, group_size=-1))
    assert whole.num_bytes(1, 4096) == 4096 + 3
    nested = type_name(
        of_config(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_use_double_quant=True)
    )
    assert nested.num_bytes(1, 64 * 256) / (64 * 256) * 8 == pytest.approx(4.127, abs=1e-3)
    assert type_name(of_config(quant_method="modelopt", quant_algo="NVFP4")).name == "nvfp4"


@pytest.mark.parametrize(
    ("weight", "inputs", "name", "arithmetic", "bits"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, {}, "fp8", "fp8", 8 + 16 / 128),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, {}, "int8", "int8", 8 + 16 / 128),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
            None,
            "int4-g64",
            "fp16",
            4.25,
        ),
    ],
)
def test_compressed_tensors_are_read(weight, inputs, name, arithmetic, bits):
    groups = {"group_0": {"weights": weight, "input_activations": inputs}}
    found = type_name(of_config(quant_method="compressed-tensors", config_groups=groups))
    assert (found.name, found.arithmetic) == (name, arithmetic)
    assert found.num_bytes(128, 128) * 8 / 128**2 == pytest.approx(bits)


@pytest.mark.parametrize(
    "ignored",
    ["model.layers.3.mlp", "model.layers.3.mlp.up_proj", "re:.*mlp.*", "model.layers.*.mlp"],
)
def test_modules_that_are_named_are_left_as_they_were(ignored):
    precision = of_config(quant_method="fp8", modules_to_not_convert=["lm_head", ignored])
    assert type_name(precision).name == "bfloat16"
    assert type_name(precision, "self_attn.q_proj").name == "fp8"


def test_a_module_is_not_taken_for_one_whose_name_begins_alike():
    precision = of_config(quant_method="fp8", ignore=["model.layers.3.mlp.up"])
    assert type_name(precision).name == "fp8"
    precision = of_config(quant_method="fp8", ignore=["model.layers.3"])
    assert type_name(precision, layer=30).name == "fp8"


def test_attention_of_the_405b_in_fp8_is_not():
    precision = precision_of(spec_of("llama-3.1-405b-fp8"))
    attention = WeightShape("self_attn.q_proj", "attention", 128, 128, layer=5)
    assert precision.type_of(attention).name == "bfloat16"
    assert type_name(precision, layer=5).name == "fp8"
    assert type_name(precision, layer=0).name == "bfloat16"


def test_a_name_wins_over_the_config():
    spec = spec_of("deepseek-v3")
    assert precision_of(spec).name == "fp8-block"
    assert precision_of(spec, "bf16").type_of(weights(spec)[3]).name == "bfloat16"


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("fp9", "fp8"), ("Q4_K_L", "Q4_K_M"), ("int5-g32", "int4-g32")]
)
def test_unknown_quantizations_are_errors_with_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError, match=nearest):
        precision_of(spec_of("llama-3.1-8b"), wrong)


def test_unknown_types_are_errors():
    with pytest.raises(ConfigError, match="dtype"):
        precision_of(spec_of("llama-3.1-8b"), dtype="int3")
    with pytest.raises(ConfigError, match="fp8"):
        precision_of(spec_of("llama-3.1-8b"), kv_cache_dtype="fp9")


def test_every_name_that_is_listed_is_known():
    spec = spec_of("olmoe-1b-7b")
    for name in quantizations():
        assert weights_bytes(spec, precision_of(spec, name)) > 0
