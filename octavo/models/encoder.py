"""The base of encoder models: embeddings and their norm, and layers in which all tokens see all.

A model brings its layer, as decoders do (``decoder.py``)::

    class BertModel(Encoder):
        layer_type = BertLayer

It has no head: what a text comes to is made of the hidden states of its tokens
(``runtime/pooler.py``).
"""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding, PositionEmbedding, TypeEmbedding
from octavo.layers.module import Module
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.models.decoder import MakeLayer


class EncoderModel(Module):
    """Token ids to hidden states.

    Args:
        norm: after the last layer; None where a layer ends with a norm.
    """

    def __init__(self, config: ModelConfig, layers: list[Module], norm: Module | None):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_types = self.embed_positions = None
        if config.token_types:
            self.embed_types = TypeEmbedding(config.token_types, config.hidden_size)
        if config.learned_positions is not None:
            offset = config.learned_positions - config.max_position
            self.embed_positions = PositionEmbedding(
                config.learned_positions, config.hidden_size, offset
            )
        self.embed_norm = LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)
        self.rotary_emb = RotaryEmbedding(config.rope) if config.turns_positions else None
        self.rotary_emb_local = None
        if config.local_rope is not None:
            self.rotary_emb_local = RotaryEmbedding(config.local_rope)
        self.layers = layers
        self.norm = norm
        self._is_local = tuple(window is not None for window in config.layer_windows)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        x = self.embed_tokens(token_ids, ctx)
        if self.embed_types is not None:
            x = ctx.ops.add(x, self.embed_types(ctx))
        if self.embed_positions is not None:
            x = ctx.ops.add(x, self.embed_positions(ctx))
        x = self.embed_norm(x, ctx)
        everywhere: Any = None if self.rotary_emb is None else self.rotary_emb(ctx)
        nearby = everywhere if self.rotary_emb_local is None else self.rotary_emb_local(ctx)
        for layer, is_local in zip(self.layers, self._is_local, strict=True):
            x = layer(x, nearby if is_local else everywhere, ctx)
        return x if self.norm is None else self.norm(x, ctx)


class Encoder(Module):
    """See :class:`octavo.models.registry.HiddenStates`."""

    layer_type: ClassVar[MakeLayer]

    def __init__(self, config: ModelConfig):
        self.config = config
        layers = [self.layer_type(config, index) for index in range(config.num_layers)]
        self.model = EncoderModel(config, layers, self.make_norm(config))

    @staticmethod
    def make_norm(config: ModelConfig) -> Module | None:
        """The one after the last layer."""
        return None

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        hidden: Activations = self.model(token_ids, ctx)
        return hidden
