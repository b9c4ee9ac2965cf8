"""The feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.layers.context import ForwardContext
from octavo.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); ``activation`` as in ``ModelConfig``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ):
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        gate, up = self.gate_proj(x, ctx), self.up_proj(x, ctx)
        if self.activation == "silu":
            product = ctx.ops.silu_mul(gate, up)
        else:
            product = ctx.ops.gelu_mul(gate, up, self.activation == "gelu_tanh")
        return self.down_proj(product, ctx)
