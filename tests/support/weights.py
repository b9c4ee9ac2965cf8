"""Weights as tests have them: tensors as if of a file; real models on the reference ops, in a tenth
of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from octavo.kernels import reference
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.tensors import BlockTensor, WeightTensor

_TYPES = {
    torch.float32: GGMLType.F32,
    torch.float16: GGMLType.F16,
    torch.bfloat16: GGMLType.BF16,
}


def stored(tensor: WeightTensor) -> Weight:
    """A tensor as a checkpoint has it, and as the native kernels take it."""
    if isinstance(tensor, BlockTensor):
        return StoredWeight(tensor.type, tensor.data.numpy(), tensor.shape)
    data = tensor.contiguous().view(torch.uint8).view(-1, tensor.shape[-1] * tensor.itemsize)
    return StoredWeight(_TYPES[tensor.dtype], data.numpy(), tuple(tensor.shape))


@contextlib.contextmanager
def dequantized_once() -> Iterator[None]:
    """The reference ops dequantize every weight at every step, into memory that they use again.
    Here they keep the numbers, which are the same to the bit."""
    pieces, kept = reference._pieces, {}

    def keep(weight, dtype):
        if id(weight) not in kept:
            kept[id(weight)] = weight, [(row, each.clone()) for row, each in pieces(weight, dtype)]
        return kept[id(weight)][1]

    with mock.patch.object(reference, "_pieces", keep):
        yield
