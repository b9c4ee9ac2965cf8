"""Parts and configs of any kind: what is wrong is a ModelError, and all else can be read."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import quantized
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ModelError
from octavo.quantization.base import StoredWeight
from octavo.quantization.formats.registry import open_format

PATH = Path("config.json")
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}


def compressed(**weights):
    group = {"targets": ["Linear"], "weights": {**W4, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["x"]}


RNG = np.random.default_rng(0)
ORDER = RNG.permutation(np.arange(64) // 16)
CASES = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "dynamic": {}},
        quantized.gptq(RNG, 32, 64, order=ORDER),
    ),
    "gptq-3bit": (
        {"quant_method": "gptq", "bits": 3, "group_size": 16, "checkpoint_format": "gptq"},
        quantized.gptq(RNG, 32, 64, 3),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
        quantized.awq(RNG, 32, 64),
    ),
    "pack-quantized": (compressed(), quantized.pack_quantized(RNG, 32, 64, order=ORDER)),
    "int-quantized": (
        compressed(num_bits=8, strategy="channel", symmetric=True),
        quantized.int_quantized(RNG, 32, 64),
    ),
    "nvfp4": (
        compressed(type="float", strategy="tensor_group"),
        quantized.float4(RNG, 32, 64, "nvfp4"),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        quantized.float8(RNG, 32, 64, (16, 16), "weight_scale_inv"),
    ),
    "nf4": ({"quant_method": "bitsandbytes"}, quantized.four_bits(RNG, 32, 64, nested=True)),
    "int8": ({"quant_method": "bitsandbytes"}, quantized.int8(RNG, 32, 64)),
}
SIZES = {"F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2": 1, "BOOL": 1, "U8": 1, "I8": 1, "F16": 2, "BF16": 2}
SIZES |= {"I16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8}


@st.composite
def other_tensors(draw, tensor):
    """As a file could have it: any dtype and shape, and as many bytes as they need."""
    dtype = draw(st.one_of(st.just(tensor.dtype), st.sampled_from(sorted(SIZES))))
    sizes = st.sampled_from([0, 1, 2, 3, 4, 16, 32, 64])
    shape = draw(st.one_of(st.just(tensor.shape), st.lists(sizes, max_size=3).map(tuple)))
    size = prod(shape) * SIZES[dtype]
    seed = draw(st.integers(0, 9))
    data = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)
    if draw(st.booleans()):
        data = np.resize(tensor.bytes, size) if tensor.nbytes else data
    return replace(tensor, dtype=dtype, shape=shape, data=data)


def read_or_refuse(config, tensors, change=lambda parts: parts):
    """Whether it was read. Nothing but a ModelError may come, and no value that is missing."""
    try:
        format = open_format(config, PATH)
        parts = change(quantized.parts_of(format, tensors))
        with np.errstate(all="ignore"):
            weight = format.assemble("m.weight", parts)
    except ModelError as error:
        assert any(word in str(error) for word in ("m.", str(PATH)))
        return False
    values = weight.floats() if isinstance(weight, StoredWeight) else weight.dequantize()
    assert values.shape == weight.shape and values.dtype == np.float32
    return True


@pytest.mark.parametrize("kind", CASES)
def test_sound_weights_are_read(kind):
    config, packed = CASES[kind]
    assert read_or_refuse(config, packed.tensors)


@settings(max_examples=150)
@given(st.data())
def test_other_parts(data):
    config, packed = CASES[data.draw(st.sampled_from(sorted(CASES)))]

    def change(parts):
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(parts)))
            parts = {**parts, name: data.draw(other_tensors(parts[name]))}
        if data.draw(st.booleans()):
            parts.pop(data.draw(st.sampled_from(sorted(parts))))
        return parts or {"x": quantized.stored(packed.tensors.popitem()[1], "m.x")}

    read_or_refuse(config, packed.tensors, change)


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([1 << 31, 1 << 70, -(1 << 70), 1e300, float("nan"), 0.5]),
    st.sampled_from(["", "gptq", "gptq_v2", "gemm", "group", "block", "re:(", "Linear"]),
    st.lists(st.integers(-1, 200), max_size=3),
    st.just({}),
    st.just({"x": {"bits": 8}}),
)


def places(config):
    """Every table of a config, with a key of it."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from places(value)


def copied(value):
    return {key: copied(each) for key, each in value.items()} if isinstance(value, dict) else value


@settings(max_examples=150)
@given(st.data())
def test_other_configs(data):
    config, packed = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    config = copied(config)
    table, key = data.draw(st.sampled_from(list(places(config))))
    table[key] = data.draw(ANY)
    read_or_refuse(config, packed.tensors)
