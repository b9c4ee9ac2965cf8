"""GPTQ: every width, both versions, any order of inputs; and what does not fit together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import gptq, int32, parts_of, words

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.quantization.formats.registry import open_format

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
PATH = Path("config.json")


def assemble(tensors, **changes):
    format = open_format({**CONFIG, **changes}, PATH)
    return format.assemble("m.weight", parts_of(format, tensors))


def refusal(tensors, error=ModelFileError, **changes):
    with pytest.raises(error) as caught:
        assemble(tensors, **changes)
    return str(caught.value)


@settings(max_examples=60)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([8, 32, 128]),
    st.booleans(),
    st.integers(0, 99),
)
def test_round_trip(bits, version, n, k, group, in_order, seed):
    rng = np.random.default_rng(seed)
    n, k = 32 * n, 32 * k
    order = None if in_order else rng.permutation(np.arange(k) // group)
    packed = gptq(rng, n, k, bits, group, version=version, order=order)
    layout = "gptq" if version == 1 else "gptq_v2"
    weight = assemble(packed.tensors, bits=bits, group_size=group, checkpoint_format=layout)
    assert (weight.shape, weight.bits, weight.format) == ((n, k), bits, "gptq")
    assert weight.nbytes == sum(tensor.nbytes for tensor in packed.tensors.values())
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_that_borrowed_from_the_next_come_back(bits):
    """GPTQModel subtracts one of each value at once, from whole words."""
    rng = np.random.default_rng(bits)
    packed = gptq(rng, 32, 32, bits, version=2)
    zeros = rng.integers(0, 2, (2, 32))
    true = words(zeros, bits)
    packed.tensors["qzeros"] = int32(true - np.uint32(sum(1 << i for i in range(0, 32, bits))))
    weight = assemble(packed.tensors, bits=bits)
    assert np.array_equal(weight.zeros, zeros.T)


@pytest.mark.parametrize("changes", [{}, {"format": "gptq_v2"}, {"checkpoint_format": "gptq"}])
def test_symmetric_files_are_read_whatever_they_are_called(changes):
    packed = gptq(np.random.default_rng(0), 32, 32, version=2, symmetric=True)
    weight = assemble(packed.tensors, sym=True, **changes)
    assert weight.zeros == 8.0
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


def test_one_group_for_a_row():
    packed = gptq(np.random.default_rng(0), 32, 64, group=64)
    weight = assemble(packed.tensors, group_size=-1)
    assert weight.group_size == 64 and weight.scales.shape == (32, 1)
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


@pytest.mark.parametrize("g_idx", [None, torch.zeros(64).int(), torch.zeros(0).int()])
def test_an_order_that_is_missing_or_was_not_filled_in(g_idx):
    packed = gptq(np.random.default_rng(0), 32, 64)
    del packed.tensors["g_idx"]
    if g_idx is not None:
        packed.tensors["g_idx"] = g_idx
    weight = assemble(packed.tensors)
    assert weight.groups is None
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


def test_modules_with_settings_of_their_own():
    packed = gptq(np.random.default_rng(0), 32, 64, bits=8, group=32)
    dynamic = {"-:other": {}, r"+:n\.": {"bits": 2}, r".*": {"bits": 8, "group_size": 32}}
    weight = assemble(packed.tensors, dynamic=dynamic)
    assert (weight.bits, weight.group_size) == (8, 32)
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


def test_a_module_with_a_name_beyond_all_bounds_is_an_error_of_its_file():
    packed = gptq(np.random.default_rng(0), 32, 64, bits=8, group=32)
    format = open_format({**CONFIG, "dynamic": {"x": {"bits": 8}}}, PATH)
    with pytest.raises(ModelFileError, match="513 characters"):
        format.assemble("n" * 513 + ".weight", parts_of(format, packed.tensors))


def test_scales_of_bfloat16():
    packed = gptq(np.random.default_rng(0), 32, 32)
    packed.tensors["scales"] = packed.tensors["scales"].bfloat16()
    weight = assemble(packed.tensors)
    assert np.array_equal(weight.scales, packed.tensors["scales"].float().numpy().T)


def test_what_does_not_fit():
    tensors = gptq(np.random.default_rng(0), 32, 64).tensors

    def changed(**parts):
        changes = {**tensors, **parts}
        return refusal({name: tensor for name, tensor in changes.items() if tensor is not None})

    assert "m.weight" in changed(qzeros=None) and "qzeros is missing" in changed(qzeros=None)
    assert "scales is missing" in changed(scales=None)
    assert "qweight is missing" in changed(qweight=None)
    assert "m.scales" in changed(scales=tensors["scales"][:3])
    assert "m.qzeros" in changed(qzeros=tensors["qzeros"][:, :2])
    assert "m.g_idx" in changed(g_idx=tensors["g_idx"] + 1)
    assert "groups -1 to 3" in changed(g_idx=tensors["g_idx"] - torch.eye(64)[0].int())
    assert "64 words" in changed(qweight=tensors["qweight"].repeat(8, 1))
    assert "of 2 dimensions" in changed(qweight=tensors["qweight"][0])
    assert "the type is F16, not I32" in changed(qweight=tensors["qweight"].half())
    assert "it is empty" in changed(qweight=tensors["qweight"][:0], g_idx=None)


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"bits": 5}, UnsupportedModelError, "5 bits.*2, 3, 4, 8"),
        ({"bits": None}, ModelFileError, "bits.*missing"),
        ({"group_size": 0}, ModelFileError, "group_size"),
        ({"sym": "yes"}, ModelFileError, "sym"),
        ({"checkpoint_format": "marlin"}, UnsupportedModelError, "marlin"),
        ({"is_marlin_format": True}, UnsupportedModelError, "special kernels"),
        ({"dynamic": {"(": {}}}, ModelFileError, "not a regular expression"),
        ({"dynamic": {"+:(?<=a)b": {}}}, ModelFileError, "only groups"),
        ({"dynamic": {f"x{n}": {} for n in range(2001)}}, ModelFileError, "more than 2000"),
        ({"dynamic": {"x": {"bits": 1}}}, UnsupportedModelError, "1 bits"),
        ({"dynamic": {"x": 4}}, ModelFileError, r"dynamic\.x"),
    ],
)
def test_configs_that_are_refused(changes, error, said):
    with pytest.raises(error, match=rf"config\.json.*{said}"):
        open_format({**CONFIG, **changes}, PATH)
