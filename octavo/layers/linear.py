"""Projections."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.layers.context import ForwardContext
from octavo.layers.parameter import Parameter


class Linear(nn.Module):
    """x [T, in_features] to [T, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features, exact=True) if bias else None

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        bias = None if self.bias is None else self.bias.tensor
        return ctx.ops.linear(x, self.weight.value, bias)


class LMHead(nn.Module):
    """Hidden states [R, hidden_size] to logits, float32 [R, vocab_size]."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.weight = Parameter(vocab_size, hidden_size)

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.ops.lm_head(hidden, self.weight.value)
