"""Normalization layers."""

from __future__ import annotations

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter


class RMSNorm(Module):
    """Scales the last dimension of x to a root mean square of 1, then by the learned weight.

    The weight is used as (stored weight + ``plus``) * ``times``.
    """

    def __init__(self, size: int, eps: float, plus: float = 0.0, times: float = 1.0):
        self.weight = Parameter(size, exact=True, plus=plus, times=times)
        self.eps = eps

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        return ctx.ops.rmsnorm(x, self.weight.value, self.eps)


class LayerNorm(Module):
    """Normalizes the last dimension of x to mean 0 and variance 1, scales it by a learned weight,
    and adds a learned ``bias`` if there is one."""

    def __init__(self, size: int, eps: float, bias: bool = True):
        self.weight = Parameter(size, exact=True)
        self.bias = Parameter(size, exact=True) if bias else None
        self.eps = eps

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        bias = None if self.bias is None else self.bias.value
        return ctx.ops.layernorm(x, self.weight.value, bias, self.eps)
