"""Weights as tensors of PyTorch's, for ops that compute when they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from octavo.quantization.base import Weight
from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantization.gguf_formats import dequantize

_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix of N rows and K columns in a GGUF format. ``data`` is uint8 [N, bytes of a row]."""

    type: GGMLType
    data: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        assert self.data.dtype == torch.uint8, self.data.dtype
        assert self.data.shape == (rows, row_bytes(self.type, columns)), (self.data.shape, self)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` as float32 [rows, K]."""
        return dequantize(self.type, self.data[start:stop])

    def select(self, rows: Tensor) -> Tensor:
        """The given rows (int64 [R]) as float32 [R, K]."""
        return dequantize(self.type, self.data.index_select(0, rows))


WeightTensor: TypeAlias = Tensor | QuantizedTensor
"""A matrix that the ops ``embed``, ``linear`` and ``lm_head`` take: both have shape and nbytes."""


def to_torch(
    weight: Weight, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> WeightTensor:
    """A weight on a device.

    On the CPU it is the same memory, so that a mapped file is never copied. Elsewhere what is not
    quantized is converted to ``dtype``, that of the activations.
    """
    device = torch.device(device)
    data = torch.from_numpy(weight.data)
    if weight.is_quantized:
        rows, columns = weight.shape
        return QuantizedTensor(weight.type, data.to(device), (rows, columns))
    values = data.view(_DTYPES[weight.type]).view(weight.shape)
    return values if device.type == "cpu" else values.to(device, dtype)
