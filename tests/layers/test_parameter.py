"""Parameters take their tensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.parameter import Parameter, ShapeMismatch, named_parameters
from octavo.quantization.base import QuantizedWeight
from octavo.quantization.ggml_types import GGMLType

CPU = torch.device("cpu")


def quantized(rows, columns):
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return QuantizedWeight(GGMLType.Q8_0, torch.from_numpy(data), (rows, columns))


def test_a_matrix_is_kept_as_it_is_in_the_file():
    for weight in (torch.ones(2, 32, dtype=torch.bfloat16), quantized(2, 32)):
        parameter = Parameter(2, 32)
        assert not parameter.is_loaded
        parameter.load(weight, CPU, torch.float32)
        assert parameter.is_loaded and parameter.value is weight


def test_exact_parameters_are_copied_to_float32():
    weight = torch.tensor([0.5, -1.0])
    parameter = Parameter(2, exact=True, plus=1.0)
    parameter.load(weight, CPU, torch.bfloat16)
    weight[0] = 7
    assert parameter.tensor.tolist() == [1.5, 0.0]
    # In float32, so that adding one does not round a bfloat16 weight.
    parameter.load(torch.tensor([2.0**-8, 0.0], dtype=torch.bfloat16), CPU, torch.bfloat16)
    assert parameter.tensor.tolist() == [1 + 2.0**-8, 1.0]


def test_wrong_shapes_are_refused():
    for weight in (torch.ones(3, 32), torch.ones(64), quantized(1, 64)):
        with pytest.raises(ShapeMismatch, match=r"not \[2, 32\]"):
            Parameter(2, 32).load(weight, CPU, torch.float32)


def test_sharing_does_not_copy():
    one, other = Parameter(2, 2), Parameter(2, 2)
    one.load(torch.ones(2, 2), CPU, torch.float32)
    other.share(one)
    assert other.value is one.value


def test_names_are_those_of_the_modules():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Linear(2, 3, bias=True), Linear(2, 3)])
    model.norm = RMSNorm(2, 1e-5)
    assert {name: p.shape for name, p in named_parameters(model)} == {
        "layers.0.weight": (3, 2),
        "layers.0.bias": (3,),
        "layers.1.weight": (3, 2),
        "norm.weight": (2,),
    }
    assert not list(model.parameters())  # nothing that torch would train
