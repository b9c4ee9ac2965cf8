"""Parameters take their tensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from weights import stored

from octavo.layers.parameter import Parameter, ShapeMismatch
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType


def quantized(rows, columns):
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return StoredWeight(GGMLType.Q8_0, data, (rows, columns))


def test_a_matrix_is_kept_as_it_is_in_the_file():
    for weight in (stored(torch.ones(2, 32, dtype=torch.bfloat16)), quantized(2, 32)):
        parameter = Parameter(2, 32)
        assert not parameter.is_loaded
        parameter.load(weight)
        assert parameter.is_loaded and parameter.value is weight


def test_exact_matrices_are_weights_in_float32():
    for weight in (stored(torch.full((3, 32), 1.5, dtype=torch.bfloat16)), quantized(3, 32)):
        parameter = Parameter(3, 32, exact=True)
        parameter.load(weight)
        assert (parameter.value.type, parameter.value.shape) == (GGMLType.F32, (3, 32))
        np.testing.assert_array_equal(parameter.value.floats(), weight.dequantize())


def test_a_matrix_of_one_row_may_be_stored_as_a_vector():
    parameter = Parameter(1, 4)
    parameter.load(stored(torch.arange(4.0)))
    assert parameter.value.shape == (1, 4) and parameter.value.floats().tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ShapeMismatch):
        Parameter(2, 4).load(stored(torch.arange(4.0)))


def test_exact_parameters_are_copied_to_float32():
    weight = torch.tensor([0.5, -1.0])
    parameter = Parameter(2, exact=True, plus=1.0)
    parameter.load(stored(weight))
    weight[0] = 7
    assert parameter.value.tolist() == [1.5, 0.0]
    # In float32, so that adding one does not round a bfloat16 weight.
    parameter.load(stored(torch.tensor([2.0**-8, 0.0], dtype=torch.bfloat16)))
    assert parameter.value.tolist() == [1 + 2.0**-8, 1.0]


def test_wrong_shapes_are_refused():
    for weight in (stored(torch.ones(3, 32)), stored(torch.ones(64)), quantized(1, 64)):
        with pytest.raises(ShapeMismatch, match=r"not \[2, 32\]"):
            Parameter(2, 32).load(weight)


def test_sharing_does_not_copy():
    one, other = Parameter(2, 2), Parameter(2, 2)
    one.load(stored(torch.ones(2, 2)))
    other.share(one)
    assert other.value is one.value
