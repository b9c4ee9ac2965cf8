"""Feed-forward parts of a layer."""

from __future__ import annotations

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear
from octavo.layers.module import Module


class GatedMLP(Module):
    """Gated MLP: down(activation(gate(x)) * up(x)); ``activation`` as in ``ModelConfig``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ):
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        gate, up = self.gate_proj(x, ctx), self.up_proj(x, ctx)
        if self.activation == "silu":
            product = ctx.ops.silu_mul(gate, up)
        else:
            product = ctx.ops.gelu_mul(gate, up, self.activation == "gelu_tanh")
        return self.down_proj(product, ctx)


class PlainMLP(Module):
    """Plain MLP: down(activation(up(x))), with or without biases; ``activation`` as in
    ``ModelConfig``."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, bias: bool):
        self.activation = activation
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        inner = ctx.ops.activate(self.up_proj(x, ctx), self.activation)
        fed: Activations = self.down_proj(inner, ctx)
        return fed
