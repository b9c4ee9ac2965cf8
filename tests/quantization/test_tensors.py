"""Weights as tensors of PyTorch's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from weights import stored

from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.tensors import BlockTensor, to_torch


@pytest.fixture
def weight():
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return BlockTensor(GGMLType.Q8_0, torch.from_numpy(data), (6, 64))


def test_rows_in_every_way(weight):
    expected = gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert weight.dequantize().numpy().tolist() == expected.tolist()
    assert weight.dequantize(2, 4).numpy().tolist() == expected[2:4].tolist()
    rows = torch.tensor([5, 0, 5])
    assert weight.select(rows).numpy().tolist() == expected[[5, 0, 5]].tolist()


def test_it_knows_its_size_and_place(weight):
    assert weight.nbytes == 6 * 2 * 34
    assert weight.device == torch.device("cpu")


def test_shape_and_bytes_must_match(weight):
    with pytest.raises(AssertionError):
        BlockTensor(GGMLType.Q8_0, weight.data, (6, 32))
    with pytest.raises(AssertionError):
        BlockTensor(GGMLType.Q8_0, weight.data.view(torch.int8), (6, 64))


def test_on_the_cpu_they_are_the_same_memory(weight):
    for tensor in (torch.randn(3, 4), torch.randn(5).half(), torch.randn(2, 2).bfloat16()):
        again = to_torch(stored(tensor))
        assert again.dtype == tensor.dtype and torch.equal(again, tensor)
        assert again.data_ptr() == tensor.data_ptr()
    again = to_torch(stored(weight))
    assert (again.type, again.shape) == (weight.type, weight.shape)
    assert again.data.data_ptr() == weight.data.data_ptr()


def test_elsewhere_floats_get_the_dtype_of_activations(weight):
    there = to_torch(stored(torch.randn(2, 2)), "meta", torch.bfloat16)
    assert there.dtype == torch.bfloat16 and there.device.type == "meta"
    assert to_torch(stored(weight), "meta", torch.bfloat16).data.dtype == torch.uint8
