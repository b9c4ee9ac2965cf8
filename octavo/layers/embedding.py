"""Token embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.layers.context import ForwardContext
from octavo.layers.parameter import Parameter


class Embedding(nn.Module):
    """Token ids (int64 [T], below vocab_size) to activations [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float | None = None):
        super().__init__()
        self.weight = Parameter(vocab_size, hidden_size)
        self.scale = scale

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.ops.embed(token_ids, self.weight.value, self.scale)
