"""Products of activations with weights of any kind: the interface, and an implementation in torch.

    x [T, K] --(norm)--> times weight [N, K] --(+ bias)--> out [T, N], or added to it
                                               `-----------> activation(first half) * second half

``triton_products.py`` has the implementation by kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
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


class Multiply(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x [T, K] @ weight [N, K] transposed, plus bias [N], in float32."""
        ...


class PlainProducts:
    """Products in float32, rounded once at the end: the oracle of all others."""

    def __init__(self, multiply: Multiply = reference.linear):
        self._multiply = multiply

    def linear(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        values = x.float()
        if fusion.norm is not None:
            values = reference.rmsnorm(values, fusion.norm.weight.float(), fusion.norm.eps)
        made = self._multiply(values, weight.dense(torch.float32), fusion.bias)
        if fusion.activation is not None:
            made = ACTIVATIONS[fusion.activation](*made.chunk(2, dim=1))
        out.copy_(out + made if fusion.accumulate else made)

    def rows(self, weight: DeviceWeight, ids: Tensor, out: Tensor) -> None:
        out.copy_(weight.dense(torch.float32)[ids])

    def reset(self) -> None:
        pass  # nothing is counted


def multiply_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as ``reference.linear`` does, so that an output has the same bits whatever other
    outputs the weight has: in blocks of as many outputs as rows, filled up with zeros."""
    (num_rows, k), num_outputs, size = x.shape, weight.shape[0], reference.ROW_TILE
    rows = F.pad(x, (0, 0, 0, -num_rows % size)).view(-1, size, k)
    blocks = F.pad(weight, (0, 0, 0, -num_outputs % size)).view(-1, size, k)
    made = torch.stack(
        [torch.bmm(blocks, tile.t().expand(len(blocks), k, size)).flatten(0, 1) for tile in rows]
    )
    out = made.transpose(1, 2).reshape(-1, made.shape[1])[:num_rows, :num_outputs].contiguous()
    return out if bias is None else out + bias.to(out.dtype)
