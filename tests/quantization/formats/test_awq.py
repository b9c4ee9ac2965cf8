"""AWQ in the layout of AutoAWQ's GEMM kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import awq, parts_of

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.quantization.formats.registry import open_format

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
PATH = Path("config.json")


def assemble(tensors, config=CONFIG):
    format = open_format(config, PATH)
    return format.assemble("m.weight", parts_of(format, tensors))


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_round_trip(n, k, seed):
    packed = awq(np.random.default_rng(seed), 8 * n, 16 * k)
    weight = assemble(packed.tensors)
    assert (weight.shape, weight.format) == ((8 * n, 16 * k), "awq")
    np.testing.assert_array_equal(weight.dequantize(), packed.values)
    for start, stop in ((0, 1), (3, 8), (n, 8 * n)):  # not only whole words of rows
        assert np.array_equal(weight.dequantize(start, stop), packed.values[start:stop])


def test_the_spelling_of_old_files():
    old = {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}
    packed = awq(np.random.default_rng(0), 16, 32)
    weight = assemble(packed.tensors, {"quant_method": "awq", **old})
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


def test_one_group_for_a_row():
    packed = awq(np.random.default_rng(0), 16, 32, group=32)
    weight = assemble(packed.tensors, {**CONFIG, "group_size": -1})
    np.testing.assert_array_equal(weight.dequantize(), packed.values)


def test_what_does_not_fit():
    tensors = awq(np.random.default_rng(0), 16, 32).tensors
    for name in tensors:
        with pytest.raises(ModelFileError, match=rf"m\.weight.*{name} is missing"):
            assemble({other: tensors[other] for other in tensors if other != name})
        with pytest.raises(ModelFileError, match=r"m\.\w+.*the shape is"):
            assemble({**tensors, name: tensors[name][:, 1:]})


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"bits": 8}, UnsupportedModelError, "8 bits"),
        ({"version": "gemv"}, UnsupportedModelError, "gemv"),
        ({"group_size": None}, ModelFileError, "q_group_size.*missing"),
        ({"group_size": 0}, ModelFileError, "group_size"),
    ],
)
def test_configs_that_are_refused(changes, error, said):
    with pytest.raises(error, match=rf"config\.json.*{said}"):
        open_format({**CONFIG, **changes}, PATH)
