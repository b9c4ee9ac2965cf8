"""Matrices on the device, ready to be multiplied with.

weight = pack([q, k, v], device, dtype)         one matrix: the rows of q, k and v
weight.linear(x, out, products, norm=norm)      see products.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.cuda.products import Around, Norm, Products
from octavo.quantization.base import Weight


class DeviceWeight(Protocol):
    """A matrix [N, K], whatever it is kept as."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """On the device."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """A copy of its numbers [N, K], or they themselves."""
        ...

    def linear(
        self,
        x: Tensor,
        out: Tensor,
        products: Products,
        *,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        activation: str | None = None,
        accumulate: bool = False,
    ) -> None:
        """out = x @ weight.T; what is around it is described in ``Around``."""
        products.linear(x, self, out, Around(norm, bias, activation, accumulate))

    def rows(self, ids: Tensor, out: Tensor, products: Products) -> None:
        """The rows ``ids`` (int32 [T]) in ``out`` [T, K]."""
        products.rows(self, ids, out)


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight(DeviceWeight):
    """In a float type. ``values`` [N, K] is contiguous."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


def pack(weights: Sequence[Weight], device: torch.device | str, dtype: torch.dtype) -> DeviceWeight:
    """Weights of one K as one matrix on the device, the rows of the first one first.

    Those that are not quantized, and those that no kernel reads as they are, become ``dtype``.
    """
    total, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    values = torch.empty(total, width, dtype=dtype, device=device)
    start = 0
    for weight in weights:
        for first in range(0, weight.shape[0], step := max(1, _PIECE_VALUES // width)):
            piece = torch.from_numpy(weight.dequantize(first, first + step))
            values[start : start + len(piece)].copy_(piece.to(device))
            start += len(piece)
    return DenseWeight(values)


_PIECE_VALUES = 1 << 24  # that are on their way to the device at a time
