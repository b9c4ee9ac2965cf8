"""What a layer holds for a weight: a tensor, or bytes of a quantized format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantization.gguf_formats import dequantize


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix of N rows and K columns in a GGUF format, as it is in the file.

    ``data`` is uint8 [N, bytes of a row]. On the CPU it is a view of the mapped file: it takes no
    memory of its own, and must not be written to.
    """

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

    def to(self, device: torch.device) -> QuantizedWeight:
        return QuantizedWeight(self.type, self.data.to(device), self.shape)

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` as float32 [rows, K]."""
        return dequantize(self.type, self.data[start:stop])

    def select(self, rows: Tensor) -> Tensor:
        """The given rows (int64 [R]) as float32 [R, K]."""
        return dequantize(self.type, self.data.index_select(0, rows))


Weight: TypeAlias = Tensor | QuantizedWeight
"""A matrix that the ops ``embed``, ``linear`` and ``lm_head`` take: both have shape and nbytes."""
