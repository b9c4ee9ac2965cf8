"""Linear projections, and the output projection to the vocabulary."""

from __future__ import annotations

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter


class Linear(Module):
    """Maps x [T, in_features] to [T, out_features]. With ``exact`` the weight is kept in
    float32."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, exact: bool = False
    ):
        self.weight = Parameter(out_features, in_features, exact=exact)
        self.bias = Parameter(out_features, exact=True) if bias else None

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        bias = None if self.bias is None else self.bias.value
        return ctx.ops.linear(x, self.weight.value, bias)


class LMHead(Module):
    """Maps hidden states [R, hidden_size] to logits, float32 [R, vocab_size]."""

    def __init__(self, hidden_size: int, vocab_size: int):
        self.weight = Parameter(vocab_size, hidden_size)

    def forward(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        return ctx.ops.lm_head(hidden, self.weight.value)
