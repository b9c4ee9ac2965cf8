"""Multi-head latent attention (MLA): its projections, and the latent vectors that it caches."""

from __future__ import annotations

from typing import Any

from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.latent_config import LatentConfig
from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm


class LatentAttention(Module):
    """Causal self-attention of one layer whose keys and values are computed from a latent
    vector."""

    def __init__(
        self,
        layer_index: int,
        hidden_size: int,
        num_heads: int,
        latent: LatentConfig,
        *,
        scale: float,
        interleaved_rope: bool = True,
        bias: bool = False,
    ):
        self.layer_index, self.latent = layer_index, latent
        self.num_heads, self.scale, self.interleaved_rope = num_heads, scale, interleaved_rope
        queries = num_heads * latent.query_dim
        if latent.q_rank is None:
            self.q_proj = Linear(hidden_size, queries)
        else:
            self.q_a_proj = Linear(hidden_size, latent.q_rank, bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, latent.norm_eps)
            self.q_b_proj = Linear(latent.q_rank, queries)
        self.kv_a_proj_with_mqa = Linear(hidden_size, latent.kv_rank + latent.rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, latent.norm_eps)
        expanded = num_heads * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = Linear(latent.kv_rank, expanded)
        self.o_proj = Linear(num_heads * latent.value_dim, hidden_size, bias)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        """Maps x [T, hidden_size] to [T, hidden_size]; ``cos_sin`` is the table of
        ``RotaryEmbedding``."""
        attended = ctx.attention.attend_latents(
            self.layer_index,
            self._queries(x, ctx).view(-1, self.num_heads, self.latent.query_dim),
            self.kv_a_proj_with_mqa(x, ctx),
            RowNorm(self.kv_a_layernorm.weight.value, self.kv_a_layernorm.eps),
            RopeArguments(ctx.positions, cos_sin, self.interleaved_rope),
            self.kv_b_proj.weight.value,
            scale=self.scale,
        )
        return self.o_proj(attended.view(-1, self.num_heads * self.latent.value_dim), ctx)

    def _queries(self, x: Activations, ctx: ForwardContext) -> Activations:
        if self.latent.q_rank is None:
            queries: Activations = self.q_proj(x, ctx)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, ctx), ctx), ctx)
        return queries
