"""Embeddings of tokens, of positions and of token types."""

from __future__ import annotations

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter


class Embedding(Module):
    """Maps token ids (int64 [T], below vocab_size) to activations [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float | None = None):
        self.weight = Parameter(vocab_size, hidden_size)
        self.scale = scale

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        return ctx.ops.embed(token_ids, self.weight.value, self.scale)


class PositionEmbedding(Module):
    """Learned embeddings of positions: activations [T, hidden_size].

    Position p has row p + ``offset`` of the table.
    """

    def __init__(self, num_rows: int, hidden_size: int, offset: int = 0):
        self.weight = Parameter(num_rows, hidden_size)
        self.offset = offset

    def forward(self, ctx: ForwardContext) -> Activations:
        return ctx.ops.embed_positions(ctx.positions, self.weight.value, self.offset)


class TypeEmbedding(Module):
    """Learned embeddings of the types of tokens: activations [T, hidden_size]."""

    def __init__(self, num_types: int, hidden_size: int):
        self.weight = Parameter(num_types, hidden_size, exact=True)

    def forward(self, ctx: ForwardContext) -> Activations:
        return ctx.ops.embed_types(ctx.token_types, self.weight.value)
