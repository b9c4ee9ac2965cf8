"""Self-attention whose output is multiplied by a gate for each value."""

from __future__ import annotations

from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a projection, before the output
    projection (arXiv 2505.06708)."""

    def __init__(self, layer_index: int, hidden_size: int, *sizes: int, **more: Any):
        super().__init__(layer_index, hidden_size, *sizes, **more)
        self.gate_proj = Linear(
            hidden_size, self.num_heads * self.head_dim, more.get("bias", False)
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.attend(x, cos_sin, ctx)
        gated: Activations = self.o_proj(ctx.ops.sigmoid_mul(self.gate_proj(x, ctx), attended), ctx)
        return gated
