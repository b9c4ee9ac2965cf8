"""Weights that stay quantized."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.quantization.base import QuantizedWeight
from octavo.quantization.ggml_types import GGMLType


@pytest.fixture
def weight():
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return QuantizedWeight(GGMLType.Q8_0, torch.from_numpy(data), (6, 64))


def test_rows_in_every_way(weight):
    expected = gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert weight.dequantize().numpy().tolist() == expected.tolist()
    assert weight.dequantize(2, 4).numpy().tolist() == expected[2:4].tolist()
    rows = torch.tensor([5, 0, 5])
    assert weight.select(rows).numpy().tolist() == expected[[5, 0, 5]].tolist()


def test_it_knows_its_size_and_place(weight):
    assert weight.nbytes == 6 * 2 * 34
    assert weight.device == torch.device("cpu")
    assert torch.equal(weight.to(torch.device("cpu")).data, weight.data)


def test_shape_and_bytes_must_match(weight):
    with pytest.raises(AssertionError):
        QuantizedWeight(GGMLType.Q8_0, weight.data, (6, 32))
    with pytest.raises(AssertionError):
        QuantizedWeight(GGMLType.Q8_0, weight.data.view(torch.int8), (6, 64))
