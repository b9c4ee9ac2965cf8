"""The EAGLE-3 head in training, unrolled as ``speculation/eagle.py`` uses it.

At a position p the head reads the feature f_p, made of the target's residual stream at a few
depths, beside the embedding e of the token p + 1. Its output stands in for the feature of p + 1,
which the target has not computed yet when the head drafts. So it is trained on its own outputs (the
"training-time test" of Li et al. 2025, "EAGLE-3", arXiv 2503.01840): K predictions ahead of p
attend to the keys of true features up to p, and to their own after it::

    x_0 = layer(e of token p + 1, f_p)              sees the true features up to p
    x_i = layer(e of token p + 1 + i, x_i-1)        sees these, and x_0 ... x_i-1 as features
    token p + 2 + i = shortlist[argmax of rows @ norm(x_i)]

It is initialized to predict what the target's last norm and head make of the deepest stream, at
every unrolled step. And each position is initialized to attend to itself: the embedding is read
through attention alone, and random queries would mix those of the whole context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.draft_training.context_examples import ContextBatch
from octavo.draft_training.stateless_heads import TrainableNorm, linear
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig

_SELF_ATTENTION = 1.7  # standard deviations of the initial keys and queries, in those of linear()


def eagle_depths(num_layers: int) -> tuple[int, ...]:
    """The numbers of target layers after which a head reads the residual stream: 2, half and all
    but 3, as published; other distinct ones for a model with few layers."""
    half = num_layers // 2
    return tuple(sorted({min(2, num_layers), half, max(num_layers - 3, half + 1)}))


class TrainableEagleHead(nn.Module):
    """An EAGLE-3 head; its modules have the names of the tensors of a published folder.

    Args:
        layer: the config of its one layer: sizes, rope and epsilon.
        num_depths: residual streams that a feature is made of.
        norm: the weight of the target's final norm, float32 [d].
    """

    def __init__(self, layer: ModelConfig, num_depths: int, norm: Tensor, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = layer.hidden_size
        self.fc = linear(num_depths * size, size, None)
        self.midlayer = _Layer(layer, generator)
        self.norm = TrainableNorm(size, layer.norm_eps)
        self._rope = RotaryEmbedding(layer.rope)
        with torch.no_grad():
            self.fc.weight[:, -size:] = torch.eye(size)
            self.norm.weight.copy_(norm)

    def states(self, inputs: ContextBatch) -> Iterator[Tensor]:
        layer, starts, count = self.midlayer, inputs.starts(), inputs.embeddings.shape[1]
        table = torch.from_numpy(self._rope.table(int(inputs.positions.max()) + count))
        pair = layer.pair(inputs.following, self.fc(inputs.streams))
        keys, values = layer.self_attn.keys_values(pair, table[inputs.positions])
        memory = _Memory(keys, values, inputs.lengths, inputs.counts)
        positions, pair = inputs.positions[starts], pair[starts]
        state = layer(pair, table[positions], memory)
        yield self.norm(state)
        for ahead in range(1, count):
            pair = layer.pair(inputs.embeddings[:, ahead], state)
            cos_sin = table[positions + ahead]
            memory.own.append(layer.self_attn.keys_values(pair, cos_sin))
            state = layer(pair, cos_sin, memory)
            yield self.norm(state)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Keys and values that B positions attend to.

    ``keys``, ``values``: those of true features, [C, heads, dim]. ``lengths``, ``counts``: of the
    pieces, as in ``ContextBatch``. ``own``: keys and values [B, heads, dim] of the unrolled steps,
    which only their own position attends to.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    counts: list[int]
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield keys, values [n, heads, dim] and own ones [m, i, heads, dim] of each piece."""
        none = self.keys.new_empty(sum(self.counts), 0, *self.keys.shape[1:])
        own = (torch.cat([none, *(pair[i][:, None] for pair in self.own)], 1) for i in (0, 1))
        return zip(
            *(part.split(self.lengths) for part in (self.keys, self.values)),
            *(part.split(self.counts) for part in own),
            strict=True,
        )


class _Layer(nn.Module):
    """A Llama layer whose attention reads an embedding and a feature, both normed. The normed
    feature is also its residual stream (``norm_before_residual``)."""

    def __init__(self, layer: ModelConfig, generator: torch.Generator):
        super().__init__()
        size, eps = layer.hidden_size, layer.norm_eps
        self.input_layernorm, self.hidden_norm = TrainableNorm(size, eps), TrainableNorm(size, eps)
        self.self_attn = _Attention(layer, generator)
        self.post_attention_layernorm = TrainableNorm(size, eps)
        self.mlp = _MLP(size, layer.intermediate_size, generator)

    def pair(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Concatenate normed embeddings and features, [n, d] each, to [n, 2 d]."""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)

    def forward(self, pair: Tensor, cos_sin: Tensor, memory: _Memory) -> Tensor:
        _, residual = pair.chunk(2, dim=-1)
        x: Tensor = residual + self.self_attn(pair, cos_sin, memory)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class _Attention(nn.Module):
    def __init__(self, layer: ModelConfig, generator: torch.Generator):
        super().__init__()
        size, dim = layer.hidden_size, layer.head_dim
        self._kv_heads, self._dim, self._scale = layer.num_kv_heads, dim, layer.attention_scale
        self.q_proj = linear(2 * size, layer.num_heads * dim, generator)
        self.k_proj = linear(2 * size, layer.num_kv_heads * dim, generator)
        self.v_proj = linear(2 * size, layer.num_kv_heads * dim, generator)
        self.o_proj = linear(layer.num_heads * dim, size, None)
        self._attend_to_itself(size)

    @torch.no_grad()
    def _attend_to_itself(self, size: int) -> None:
        """Initialize each query to the key of its position, by the embedding alone: the product of
        a vector with itself is larger than with random others."""
        self.k_proj.weight[:, size:] = 0
        self.k_proj.weight *= _SELF_ATTENTION
        keys = self.k_proj.weight.unflatten(0, (self._kv_heads, 1, self._dim))
        queries = self.q_proj.weight.unflatten(0, (self._kv_heads, -1, self._dim))
        queries.copy_(keys.expand_as(queries))

    def keys_values(self, pair: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of rows [n, 2 d]; ``cos_sin`` [n, dim] as of ``RotaryEmbedding``."""
        keys = self._heads(self.k_proj(pair))
        return _rotated(keys, cos_sin[:, None]), self._heads(self.v_proj(pair))

    def forward(self, pair: Tensor, cos_sin: Tensor, memory: _Memory) -> Tensor:
        queries = _rotated(self._heads(self.q_proj(pair)), cos_sin[:, None])
        queries = queries.unflatten(1, (self._kv_heads, -1)) * self._scale  # [B, heads, group, dim]
        mixed = [
            _attend(asking, *piece)
            for asking, piece in zip(queries.split(memory.counts), memory.pieces(), strict=True)
        ]
        attended: Tensor = self.o_proj(torch.cat(mixed).flatten(1))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self._dim))


class _MLP(nn.Module):
    def __init__(self, size: int, inner: int, generator: torch.Generator):
        super().__init__()
        self.gate_proj = linear(size, inner, generator)
        self.up_proj = linear(size, inner, generator)
        self.down_proj = linear(inner, size, None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    """Causal attention of the last m of n positions, and of each to its own keys.

    ``queries`` and the result: [m, heads, group, dim]. ``keys``: [n, heads, dim]. ``own_keys``:
    [m, i, heads, dim].
    """
    m, n = len(queries), len(keys)
    later = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    scores = torch.einsum("mhgd,nhd->mhgn", queries, keys)
    scores = scores.masked_fill(later[:, None, None], -torch.inf)
    of_own = torch.einsum("mhgd,mihd->mhgi", queries, own_keys)
    weights = torch.cat([scores, of_own], dim=-1).softmax(dim=-1)
    mixed = torch.einsum("mhgn,nhd->mhgd", weights[..., :n], values)
    return mixed + torch.einsum("mhgi,mihd->mhgd", weights[..., n:], own_values)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary embedding to [n, heads, dim]. ``cos_sin``: cosines, then sines, [n, 1, dim]."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
