"""bitsandbytes: blocks over the rows one after the other, scales that are quantized, int8."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import four_bits, int8, parts_of

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.quantization.base import StoredWeight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.registry import open_format

PATH = Path("config.json")
STATE = "weight.quant_state.bitsandbytes__nf4"


def assemble(tensors):
    format = open_format({"load_in_4bit": True}, PATH)
    return format.assemble("m.weight", parts_of(format, tensors))


def values_of(weight):
    return weight.floats() if isinstance(weight, StoredWeight) else weight.dequantize()


def with_state(tensors, **changes):
    state = {**json.loads(tensors[STATE].numpy().tobytes()), **changes}
    text = json.dumps({key: value for key, value in state.items() if value is not None})
    return {**tensors, STATE: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 150),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(["nf4", "fp4"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_four_bits(n, k, block, kind, nested, seed):
    rng = np.random.default_rng(seed)
    packed = four_bits(rng, n, k, kind=kind, nested=nested, block=block)
    weight = assemble(packed.tensors)
    assert weight.shape == (n, k)
    np.testing.assert_array_equal(values_of(weight), packed.values)
    fits = k % 2 == 0 and (k % block == 0 or block % k == 0)
    assert isinstance(weight, CodedWeight if fits else StoredWeight)
    if isinstance(weight, CodedWeight):
        assert (weight.format, weight.bits, weight.group_size) == (kind, 4, min(block, k))


def test_bytes_that_are_stored_as_another_type():
    packed = four_bits(np.random.default_rng(0), 8, 64)
    for dtype in (torch.bfloat16, torch.float32):
        weight = packed.tensors["weight"].view(1, -1).view(dtype).view(-1, 1)
        weight = assemble({**packed.tensors, "weight": weight})
        np.testing.assert_array_equal(values_of(weight), packed.values)


def test_int8():
    packed = int8(np.random.default_rng(0), 24, 40)
    weight = assemble(packed.tensors)
    assert (weight.format, weight.bits, weight.zeros) == ("int8", 8, 128.0)
    np.testing.assert_array_equal(weight.dequantize(), packed.values)
    del packed.tensors["weight_format"]
    assert assemble(packed.tensors).shape == (24, 40)
    packed.tensors["weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(UnsupportedModelError, match=r"m\.weight_format"):
        assemble(packed.tensors)


def test_what_does_not_fit():
    packed = four_bits(np.random.default_rng(0), 16, 64, nested=True)

    def refused(said, tensors=None, **parts):
        changes = {**(tensors or packed.tensors), **parts}
        left = {name: tensor for name, tensor in changes.items() if tensor is not None}
        with pytest.raises(ModelFileError, match=said):
            assemble(left)

    for part in packed.tensors:
        if part != "weight":
            missing = part.removeprefix("weight.")
            refused(rf"m\.weight\).*{missing} is missing", **{part: None})
    for shape in ([16, 65], [1 << 30, 1 << 30], [16], [16, 64, 1], ["16", 64], [0, 64], 7):
        refused(r"m\.weight", with_state(packed.tensors, shape=shape))
    refused("blocksize", with_state(packed.tensors, blocksize=0))
    refused(r"m\.weight\.absmax", with_state(packed.tensors, blocksize=1 << 30))
    refused("nested_offset", with_state(packed.tensors, nested_offset=None))
    refused("nested_offset", with_state(packed.tensors, nested_offset=float("nan")))
    refused("nested_absmax", with_state(packed.tensors, nested_blocksize=4))
    refused(r"m\.weight\.quant_map", **{"weight.quant_map": torch.zeros(15)})
    state = torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)
    refused(rf"m\.{STATE}.*not a JSON object", **{STATE: state})
    refused("not JSON", **{STATE: state[:1]})
    refused("65,537 bytes", **{STATE: torch.zeros(65_537, dtype=torch.uint8)})
    whole = int8(np.random.default_rng(0), 24, 40).tensors
    refused(r"m\.SCB", whole, SCB=torch.zeros(23))
    refused("SCB is missing", whole, SCB=None)
