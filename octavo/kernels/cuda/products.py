"""Products of activations with weights of any kind: what is asked for, and its slow twin.

    x [T, K] --(norm)--> times weight [N, K] --(+ bias)--> out [T, N], or added to it
                                               `-----------> activation(first half) * second half

A weight says what its numbers are, ``Products`` how they are multiplied with: these are of plain
torch, for any device, and those of ``triton_products.py`` are of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.op_arguments import RowNorm

ACTIVATIONS = {
    "silu": reference.silu_mul,
    "gelu_tanh": reference.gelu_mul,
    "gelu_erf": lambda gate, up: reference.gelu_mul(gate, up, approximate=False),
}


@dataclass(frozen=True, slots=True)
class GemmFusion:
    """What is done before a product, and behind it; nothing, if nothing is said.

    Args:
        norm: of x.
        bias: [N].
        activation: "silu", "gelu_tanh" or "gelu_erf": of the first N / 2 outputs, times the others.
        accumulate: the product is added to what is in ``out``, the residual stream.
    """

    norm: RowNorm | None = None
    bias: Tensor | None = None
    activation: str | None = None
    accumulate: bool = False


class Products(Protocol):
    """Who multiplies, with what memory that takes. One stream's: it is used again and again."""

    def linear(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        """out = x @ weight.T, and what is around it.

        x [T, K] and out [T, N], or [T, N / 2] with an activation: of float types, rows may be
        farther apart than they are long.
        """
        ...

    def rows(self, weight: DeviceWeight, ids: Tensor, out: Tensor) -> None:
        """The rows ``ids`` (int32 [T]) of a weight, in ``out`` [T, K]."""
        ...

    def reset(self) -> None:
        """Count from 0 again, after launches of which some may be missing."""
        ...


class PlainProducts:
    """In float32, and rounded once at the end: what all others are measured against."""

    def linear(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        values = x.float()
        if fusion.norm is not None:
            values = reference.rmsnorm(values, fusion.norm.weight.float(), fusion.norm.eps)
        made = reference.linear(values, weight.dense(torch.float32), fusion.bias)
        if fusion.activation is not None:
            made = ACTIVATIONS[fusion.activation](*made.chunk(2, dim=1))
        out.copy_(out + made if fusion.accumulate else made)

    def rows(self, weight: DeviceWeight, ids: Tensor, out: Tensor) -> None:
        out.copy_(weight.dense(torch.float32)[ids])

    def reset(self) -> None:
        pass  # nothing is counted
