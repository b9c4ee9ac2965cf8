"""Products of activations with weights of any kind: the interface, and an implementation in torch.

    x [T, K] --(norm)--> times weight [N, K] --(+ bias)--> out [T, N], or added to it
                                               `-----------> activation(first half) * second half

``triton_products.py`` has the implementation by kernels.
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
    """Work fused with a product; nothing by default.

    Args:
        norm: of x, before the product.
        bias: [N].
        activation: "silu", "gelu_tanh" or "gelu_erf": of the first N / 2 outputs, times the others.
        accumulate: the product is added to ``out``, the residual stream.
    """

    norm: RowNorm | None = None
    bias: Tensor | None = None
    activation: str | None = None
    accumulate: bool = False


class Products(Protocol):
    """Products of one stream, which reuse the same memory."""

    def linear(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        """Compute out = x @ weight.T, with the fused work before and behind it.

        x is [T, K] and out [T, N], or [T, N / 2] with an activation: of float types, with any row
        stride.
        """
        ...

    def rows(self, weight: DeviceWeight, ids: Tensor, out: Tensor) -> None:
        """Write the rows ``ids`` (int32 [T]) of a weight to ``out`` [T, K]."""
        ...

    def reset(self) -> None:
        """Reset the counters, after a step of which some launches may be missing."""
        ...


class PlainProducts:
    """Products in float32, rounded once at the end: the oracle of all others."""

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
