"""Self-attention: projections, rotary embeddings, and attention over the paged KV cache."""

from __future__ import annotations

from typing import Any

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.parameter import Parameter


class Attention(Module):
    """Self-attention of one layer, with grouped query heads.

    Args:
        window: positions that a query sees; None for all.
        qk_norm_eps: epsilon of the rmsnorms of queries and keys, over each head, or over all heads
            of a token at once if ``whole_qk_norm``; None for no norms.
        sinks: each head has a learned logit in its softmax that belongs to no value.
        bidirectional: a query sees the positions after its own as it sees those before.
    """

    def __init__(
        self,
        layer_index: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        interleaved_rope: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm_plus: float = 0.0,
        whole_qk_norm: bool = False,
        sinks: bool = False,
        bidirectional: bool = False,
    ):
        self.layer_index = layer_index
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.interleaved_rope, self.bidirectional = interleaved_rope, bidirectional
        self.q_proj: Module = Linear(hidden_size, num_heads * head_dim, bias)
        self.k_proj: Module = Linear(hidden_size, num_kv_heads * head_dim, bias)
        self.v_proj: Module = Linear(hidden_size, num_kv_heads * head_dim, bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, output_bias)
        self.q_norm = self.k_norm = None
        self.whole_qk_norm = whole_qk_norm
        if qk_norm_eps is not None:
            heads, kv_heads = (num_heads, num_kv_heads) if whole_qk_norm else (1, 1)
            self.q_norm = RMSNorm(heads * head_dim, qk_norm_eps, qk_norm_plus)
            self.k_norm = RMSNorm(kv_heads * head_dim, qk_norm_eps, qk_norm_plus)
        self.sinks = Parameter(num_heads, exact=True) if sinks else None

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        """Maps x [T, hidden_size] to [T, hidden_size].

        ``cos_sin`` is the table of ``RotaryEmbedding``, or None for layers without rotation.
        """
        attended: Activations = self.o_proj(self.attend(x, cos_sin, ctx), ctx)
        return attended

    def attend(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        """Computes the attention without the output projection: [T, num_heads * head_dim]."""
        q = self._heads(self.q_proj(x, ctx), self.q_norm, self.num_heads, ctx)
        k = self._heads(self.k_proj(x, ctx), self.k_norm, self.num_kv_heads, ctx)
        v = self._heads(self.v_proj(x, ctx), None, self.num_kv_heads, ctx)

        def rotated(positions: Any) -> Any:
            if cos_sin is None:
                return q, k
            return ctx.ops.rope(q, k, positions, cos_sin, self.interleaved_rope)

        rotated_q, rotated_k = rotated(ctx.positions)
        attended = ctx.attention.attend(
            self.layer_index,
            rotated_q,
            rotated_k,
            v,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.value,
            rotated=lambda positions: rotated(positions)[0],
            bidirectional=self.bidirectional,
        )
        heads: Activations = attended.view(-1, self.num_heads * self.head_dim)
        return heads

    def _heads(
        self, x: Activations, norm: RMSNorm | None, num_heads: int, ctx: ForwardContext
    ) -> Any:
        """Splits [T, num_heads * head_dim] into normed heads [T, num_heads, head_dim]."""
        if norm is None:
            return x.view(-1, num_heads, self.head_dim)
        if self.whole_qk_norm:
            return norm(x, ctx).view(-1, num_heads, self.head_dim)
        return norm(x.view(-1, num_heads, self.head_dim), ctx)
