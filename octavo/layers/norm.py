"""Normalization."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.layers.context import ForwardContext
from octavo.layers.parameter import Parameter


class RMSNorm(nn.Module):
    """Scales the last dimension of x to a root mean square of 1, then by a learned weight."""

    def __init__(self, size: int, eps: float, plus: float = 0.0):
        super().__init__()
        self.weight = Parameter(size, exact=True, plus=plus)
        self.eps = eps

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.ops.rmsnorm(x, self.weight.tensor, self.eps)
