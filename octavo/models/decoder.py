"""The base of decoder models: an embedding, layers, a last norm, a head.

A model brings its layer, and names its class::

    class LlamaForCausalLM(DecoderForCausalLM):
        layer_type = LlamaDecoderLayer

A layer is called with (x [T, hidden_size], cos_sin, ctx), and gives what x is after it. ``cos_sin``
is the table of the rope that its kind of layer has, see ``RotaryEmbedding``; None: it has none.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Protocol, Self

from octavo.layers.attention import Attention
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding, PositionEmbedding
from octavo.layers.experts import ExpertMLPs
from octavo.layers.linear import LMHead
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig


class MakeLayer(Protocol):
    def __call__(self, config: ModelConfig, index: int, /) -> Module: ...


class DecoderModel(Module):
    """Token ids to hidden states, after the last norm."""

    def __init__(self, config: ModelConfig, layers: list[Module], norm: Module):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.embed_positions = None
        if config.learned_positions is not None:
            offset = config.learned_positions - config.max_position
            self.embed_positions = PositionEmbedding(
                config.learned_positions, config.hidden_size, offset
            )
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.rotary_emb_local = None
        if config.local_rope is not None:
            self.rotary_emb_local = RotaryEmbedding(config.local_rope)
        self.layers = layers
        self.norm = norm
        self._turns = tuple(
            None if index in config.unrotated_layers else window is not None
            for index, window in enumerate(config.layer_windows)
        )

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        x = self.embed_tokens(token_ids, ctx)
        if self.embed_positions is not None:
            x = ctx.ops.add(x, self.embed_positions(ctx))
        everywhere = nearby = self.rotary_emb(ctx)
        if self.rotary_emb_local is not None:
            nearby = self.rotary_emb_local(ctx)
        tables = {None: None, False: everywhere, True: nearby}
        # Of layers there are fewer where somebody leaves early.
        for layer, is_local in zip(self.layers, self._turns, strict=False):
            x = layer(x, tables[is_local], ctx)
        return self.norm(x, ctx)


class DecoderForCausalLM(Module):
    """See :class:`octavo.models.registry.CausalLM`."""

    layer_type: ClassVar[MakeLayer]

    def __init__(self, config: ModelConfig):
        self.config = config
        layers = [self.layer_type(config, index) for index in range(config.num_layers)]
        self.model = DecoderModel(config, layers, self.make_norm(config))
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)

    @staticmethod
    def make_norm(config: ModelConfig) -> Module:
        """The one before the head."""
        return RMSNorm(config.hidden_size, config.norm_eps, float(config.norm_plus_one))

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        hidden: Activations = self.model(token_ids, ctx)
        return hidden

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        logits: Activations = self.lm_head(hidden, ctx)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale is not None:
            logits = ctx.ops.scale(logits, scale)
        return logits if cap is None else ctx.ops.softcap(logits, cap)

    def exit_after(self, num_layers: int) -> Self:
        changed = copy.copy(self)
        changed.model = copy.copy(self.model)
        changed.model.layers = self.model.layers[:num_layers]
        return changed


def add_scaled(
    x: Activations, y: Activations, scale: float | None, ctx: ForwardContext
) -> Activations:
    """x + scale * y: what a half of a layer does to the stream, see ``ModelConfig``."""
    added: Activations = ctx.ops.add(x, y if scale is None else ctx.ops.scale(y, scale))
    return added


def make_attention(
    config: ModelConfig, index: int, make: type[Attention] = Attention, **more: Any
) -> Attention:
    """The attention of a layer as its config has it; ``more`` is what the config leaves open."""
    return make(
        config.kv_index(index),
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.attention_scale,
        window=config.layer_windows[index],
        softcap=config.attention_softcap,
        interleaved_rope=config.rope.interleaved,
        bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        bidirectional=config.bidirectional,
        **more,
    )


def make_mlp(config: ModelConfig, index: int) -> Module:
    """The part of a layer that sees one position: experts where it has them, or one MLP."""
    experts = config.experts
    if experts is None or not experts.layers[index]:
        return GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )
    return ExpertMLPs(
        config.hidden_size,
        experts.inner,
        experts.routing,
        experts.activation,
        bias=experts.bias,
        router_bias=experts.router_bias,
        correction=experts.correction,
        shared_inner=experts.shared_inner,
        shared_gate=experts.shared_gate,
    )
