"""compressed-tensors: its layouts, its strategies, and which scheme a weight is of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import float4, float8, int_quantized, pack_quantized, parts_of, stream, with_gaps

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.quantization.formats.registry import open_format

PATH = Path("config.json")
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
F8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def config(weights, **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **changes,
    }


def assemble(tensors, config, name="m.weight"):
    format = open_format(config, PATH)
    return format.assemble(name, parts_of(format, tensors))


def check(packed, weights, **changes):
    weight = assemble(packed.tensors, config(weights, **changes))
    assert weight.shape == packed.values.shape and weight.format == "compressed-tensors"
    np.testing.assert_array_equal(weight.dequantize(), packed.values)
    return weight


@settings(max_examples=60)
@given(
    st.integers(2, 8),
    st.sampled_from([stream, with_gaps]),
    st.booleans(),
    st.integers(1, 50),
    st.integers(1, 3),
    st.sampled_from([16, 40, 128]),
    st.integers(0, 99),
)
def test_packed_integers(bits, pack, symmetric, n, k, group, seed):
    rng = np.random.default_rng(seed)
    packed = pack_quantized(rng, n, 32 * k, bits, group, pack=pack, symmetric=symmetric)
    check(packed, {**W4, "num_bits": bits, "group_size": group, "symmetric": symmetric})


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_rows_of_which_only_the_version_tells_how_they_are_packed(bits):
    for version, pack in (("0.17.1", with_gaps), ("0.18.0", stream), (None, stream)):
        packed = pack_quantized(np.random.default_rng(0), 24, 20, bits, 20, pack=pack)
        check(packed, {**W4, "num_bits": bits, "group_size": 20}, version=version)


def test_inputs_in_act_order():
    rng = np.random.default_rng(0)
    order = rng.permutation(np.arange(64) // 16)
    weight = check(pack_quantized(rng, 32, 64, order=order), W4)
    assert np.array_equal(weight.groups, order)
    natural = pack_quantized(rng, 32, 64)
    for g_idx in (torch.full((64,), -1), torch.arange(64) // 16):
        natural.tensors["weight_g_idx"] = g_idx.int()
        assert check(natural, W4).groups is None


@pytest.mark.parametrize("strategy", ["channel", None])
def test_rows_of_one_group(strategy):
    """Old configs do not name the strategy: it is in the size of the group."""
    rng = np.random.default_rng(0)
    channel = {**W4, "strategy": strategy, "group_size": None if strategy else -1}
    check(pack_quantized(rng, 32, 64, group=64), channel)


def test_bytes():
    rng = np.random.default_rng(0)
    channel = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    assert check(int_quantized(rng, 24, 40), channel, format="int-quantized").zeros == 128.0
    packed = int_quantized(rng, 24, 40)
    zeros = rng.integers(-9, 9, (24, 1)).astype(np.int8)
    scales = packed.tensors["weight_scale"].float().numpy()
    packed = packed._replace(values=packed.values - zeros * scales)
    packed.tensors["weight_zero_point"] = torch.from_numpy(zeros)
    weight = assemble(packed.tensors, config({**channel, "symmetric": False}))
    np.testing.assert_allclose(weight.dequantize(), packed.values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "strategy, block",
    [
        ({"strategy": "tensor"}, (999, 999)),
        ({"strategy": "channel"}, (1, 999)),
        ({"strategy": "group", "group_size": 16}, (1, 16)),
        ({"strategy": "block", "block_structure": [16, 8]}, (16, 8)),
    ],
)
def test_floats_of_8_bits(strategy, block):
    packed = float8(np.random.default_rng(0), 40, 24, block, "weight_scale")
    check(packed, {**F8, **strategy}, format="float-quantized")
    packed.tensors["input_scale"] = torch.ones(1)  # no part of it: the folder leaves it out
    assert open_format(config(F8), PATH).part("m.input_scale") is None


def test_floats_of_4_bits():
    rng = np.random.default_rng(0)
    mxfp4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    check(float4(rng, 8, 64, "mxfp4"), mxfp4, format="mxfp4-pack-quantized")
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    packed = float4(rng, 8, 64, "nvfp4")
    check(packed, nvfp4, format="nvfp4-pack-quantized")
    packed.tensors["weight_global_scale"] = torch.zeros(1)
    with pytest.raises(ModelFileError, match=r"m\.weight_global_scale.*to divide by"):
        check(packed, nvfp4)


def test_zeros_of_floats_must_be_none():
    packed = float8(np.random.default_rng(0), 16, 16, (16, 16), "weight_scale")
    packed.tensors["weight_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    check(packed, F8)
    packed.tensors["weight_zero_point"] = torch.ones(1).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match=r"m\.weight_zero_point"):
        check(packed, F8)


# Which scheme -------------------------------------------------------------------------------------


def test_targets_name_modules_exactly_by_pattern_or_by_class():
    def group(bits, *targets):
        return {"targets": list(targets), "weights": {**W4, "num_bits": bits}}

    groups = {
        "group_0": group(4, "Linear"),
        "group_1": group(8, "re:.*down_proj", "Embedding"),
        "group_2": group(2, "model.layers.0.mlp.down_proj"),
        "group_3": {"targets": ["LlamaAttention"], "weights": None},
    }
    given = config({}, config_groups=groups, ignore=["re:.*lm_head", "visual"])
    rng = np.random.default_rng(0)
    for name, bits in (
        ("model.layers.0.mlp.up_proj", 4),
        ("model.layers.1.mlp.down_proj", 8),
        ("model.layers.0.mlp.down_proj", 2),
        ("model.embed_tokens", 8),
    ):
        packed = pack_quantized(rng, 32, 64, bits)
        assert assemble(packed.tensors, given, f"{name}.weight").bits == bits
    with pytest.raises(ModelFileError, match=r"lm_head\.weight.*config ignores it"):
        assemble(packed.tensors, given, "model.lm_head.weight")
    given["config_groups"].pop("group_0")
    with pytest.raises(ModelFileError, match="no group"):
        assemble(packed.tensors, given, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ModelFileError, match="513 characters"):
        assemble(packed.tensors, given, "n" * 513 + ".weight")


# What does not fit --------------------------------------------------------------------------------


def test_parts_that_do_not_fit():
    tensors = pack_quantized(np.random.default_rng(0), 32, 64).tensors

    def refused(said, **parts):
        changes = {**tensors, **parts}
        left = {name: tensor for name, tensor in changes.items() if tensor is not None}
        with pytest.raises(ModelFileError, match=said):
            assemble(left, config(W4))

    refused("weight_zero_point is missing", weight_zero_point=None)
    refused("weight_scale is missing", weight_scale=None)
    refused("weight_shape is missing", weight_shape=None)
    refused("weight is missing", weight_packed=None)
    refused(r"m\.weight_packed.*8 words.*65 integers", weight_shape=torch.tensor([32, 65]))
    refused(r"m\.weight_packed", weight_shape=torch.tensor([32, 1 << 60]))
    refused(r"m\.weight_shape.*\[31, 64\]", weight_shape=torch.tensor([31, 64]))
    refused(r"m\.weight_shape", weight_shape=torch.tensor([-1, 64]))
    refused(r"m\.weight_scale.*each block of 1 x 16", weight_scale=tensors["weight_scale"][:, 1:])
    refused(r"m\.weight_zero_point", weight_zero_point=tensors["weight_zero_point"][:3])
    refused(r"m\.weight_g_idx.*0 to 3", weight_g_idx=torch.full((64,), 4))
    refused("the type is F32", weight_packed=torch.zeros(32, 8))


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"strategy": "token"}, UnsupportedModelError, "'token'.*tensor, channel"),
        ({"group_size": None}, ModelFileError, r"group_0\.weights\.group_size"),
        ({"strategy": "block"}, ModelFileError, r"block_structure"),
        ({"num_bits": "4"}, ModelFileError, r"num_bits"),
    ],
)
def test_schemes_that_are_refused(changes, error, said):
    with pytest.raises(error, match=rf"config\.json.*{said}"):
        open_format(config({**W4, **changes}), PATH)


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"format": "marlin-24"}, UnsupportedModelError, "marlin-24"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedModelError,
            "sparse-24-bitmask",
        ),
        (
            {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
            UnsupportedModelError,
            "rotations",
        ),
        ({"config_groups": {"W4A16": ["Linear"]}}, UnsupportedModelError, "W4A16"),
        ({"config_groups": {"a": {"weights": W4}}}, ModelFileError, "targets"),
        (
            {"config_groups": {"a": {"targets": ["re:("], "weights": W4}}},
            ModelFileError,
            "regular expression",
        ),
        ({"ignore": ["re:x"] * 2001}, ModelFileError, "more than 2000 patterns"),
        ({"ignore": ["re:x{400}"] * 500}, ModelFileError, "all patterns of the file"),
        ({"ignore": ["re:*"]}, ModelFileError, "regular expression"),
        ({"ignore": ["re:("]}, ModelFileError, "regular expression"),
        ({"ignore": ["re:(a)\\1"]}, ModelFileError, "references to groups"),
        ({"ignore": "lm_head"}, ModelFileError, "ignore"),
    ],
)
def test_configs_that_are_refused(changes, error, said):
    with pytest.raises(error, match=rf"config\.json.*{said}"):
        open_format(config(W4, **changes), PATH)


@pytest.mark.parametrize("bits", [1, 9])
def test_integers_of_other_widths(bits):
    tensors = pack_quantized(np.random.default_rng(0), 32, 64).tensors
    with pytest.raises(UnsupportedModelError, match=rf"m\.weight_packed.*{bits} bits"):
        assemble(tensors, config({**W4, "num_bits": bits}))
