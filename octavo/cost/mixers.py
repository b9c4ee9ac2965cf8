"""Mixers, the parts of layers that exchange between positions: attention of several kinds.

``recurrences.py`` has the others. Sizes are in values, and of the whole model unless a degree of
tensor parallelism is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from octavo.cost.exchange import Meeting, Shared
from octavo.cost.shares import Shares
from octavo.cost.weight_shape import WeightShape, columns, rows, vector, whole


class Mixer(Protocol):
    """The part of a layer that sees other positions."""

    @property
    def window(self) -> int | None:
        """The last positions that a query sees, its own included; None is all."""
        ...

    @property
    def heads(self) -> int:
        """Pieces that devices may share out."""
        ...

    def weights(self, hidden: int) -> Iterator[WeightShape]: ...

    def kv_vectors(self, shares: Shares) -> tuple[int, int, int]:
        """Heads, values of a key and values of a value that a device caches of each token: vectors
        with scales of their own, where the type of the cache has any."""
        ...

    def state_values(self, shares: Shares) -> int:
        """Values that a device keeps of each sequence, whatever its length."""
        ...

    def flops_per_score(self, shares: Shares) -> tuple[float, float]:
        """Operations of a device for one query and one key that it sees: when a prompt is computed,
        and for single tokens."""
        ...

    def activation_values(self, tp: int) -> float:
        """Values that a device makes of one token before it looks at others."""
        ...

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """Return the values of one token that ranks exchange, in order (scheme `gather`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention with as many keys and values as there are heads, or fewer.

    Args:
        qk_norm_size: values of both norms of queries and keys, 0 without.
        has_output_gate: queries come with as many values that gate the outputs (Qwen3-Next).
        value_is_key: keys are the values too, before both are normed (Gemma 4).
        borrows_kv: keys and values are those of a layer below (Gemma 3n).
        num_sinks: learned scores beside those of the keys (gpt-oss), one for a head.
        value_dim: of a head, if not ``head_dim``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_size: int = 0
    has_output_gate: bool = False
    value_is_key: bool = False
    borrows_kv: bool = False
    num_sinks: int = 0

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        for name, heads, dim in self._projections():
            query_heads = 0 if self._is_normed_whole and name != "v" else self.heads
            full = f"self_attn.{name}_proj"
            yield columns(full, "attention.qkv", heads, dim, hidden, query_heads, self.kv_heads)
            if self.qkv_bias:
                yield vector(f"self_attn.{name}_proj.bias", heads, dim)
        yield rows(
            *("self_attn.o_proj", "attention.output", hidden, self.heads, self._value_dim),
            kv_heads=self.kv_heads,
        )
        if self.output_bias:
            yield WeightShape("self_attn.o_proj.bias", "norm", hidden)
        if self.qk_norm_size:
            yield WeightShape("self_attn.qk_norm", "norm", self.qk_norm_size)
        if self.num_sinks:
            yield vector("self_attn.sinks", self.num_sinks, 1)

    def _projections(self) -> Iterator[tuple[str, int, int]]:
        """Name, heads, and outputs of each."""
        yield "q", self.heads, (2 if self.has_output_gate else 1) * self.head_dim
        if not self.borrows_kv:
            yield "k", self.kv_heads, self.head_dim
            if not self.value_is_key:
                yield "v", self.kv_heads, self._value_dim

    def kv_vectors(self, shares: Shares) -> tuple[int, int, int]:
        if self.borrows_kv:
            return 0, 0, 0
        return shares.kv_heads(self.heads, self.kv_heads), self.head_dim, self._value_dim

    def state_values(self, shares: Shares) -> int:
        return 0

    def flops_per_score(self, shares: Shares) -> tuple[float, float]:
        heads = shares.heads(self.heads, self.kv_heads)
        flops = 2.0 * heads * (self.head_dim + self._value_dim)
        return flops, flops

    def activation_values(self, tp: int) -> float:
        return (self.heads + 2 * self.kv_heads) * self.head_dim / tp

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """A rank keeps queries, keys and values of its own heads to itself, unless they are normed
        over all heads at once. The gates of its outputs are applied to all of them."""
        before = []
        if self._is_normed_whole:
            before += [Shared(heads * self.head_dim) for heads in (self.heads, self.kv_heads)]
        if self.has_output_gate:
            before.append(Shared(self.heads * self._value_dim))
        if before:
            yield tuple(before)
        yield (Shared(self.heads * self._value_dim, by_heads=True),)
        yield (Shared(hidden),)

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def _is_normed_whole(self) -> bool:
        """Whether queries and keys are normed over all heads of a token at once (OLMo 2)."""
        num_heads = self.heads + self.kv_heads
        return num_heads > 2 and self.qk_norm_size == num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one vector is cached for all
    heads, so that every device of a tensor-parallel group has to have it.

    Args:
        q_rank: of the queries' own latent vector; None where they are made in one step.
        kv_rank: of the latent vector that is cached; beside it are ``rope_dim`` values of position.
        nope_dim, rope_dim, value_dim: of a head.
        selected: keys that a query looks at, of all that it sees; None is all. An ``Indexer``
            beside it selects them.
        has_output_gate: the hidden values make as many that gate the outputs (Kimi K3).
        has_bias: the projections to latent vectors, and that of the outputs, have biases.
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    selected: int | None = None
    window: int | None = None
    has_output_gate: bool = False
    has_bias: bool = False

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        query_dim = self.nope_dim + self.rope_dim
        if self.q_rank is None:
            yield self._by_heads("self_attn.q_proj", "attention.q", query_dim, hidden)
        else:
            yield whole("self_attn.q_a_proj", "attention.qkv_a", self.q_rank, hidden)
            yield WeightShape("self_attn.q_a_layernorm", "norm", self.q_rank)
            yield self._by_heads("self_attn.q_b_proj", "attention.q_b", query_dim, self.q_rank)
        latent = self.kv_rank + self.rope_dim
        yield whole("self_attn.kv_a_proj_with_mqa", "attention.qkv_a", latent, hidden)
        yield WeightShape("self_attn.kv_a_layernorm", "norm", self.kv_rank)
        expanded = self.nope_dim + self.value_dim
        yield self._by_heads("self_attn.kv_b_proj", "attention.kv_b", expanded, self.kv_rank)
        if self.has_output_gate:
            yield self._by_heads("self_attn.g_proj", "attention.gate", self.value_dim, hidden)
        yield rows("self_attn.o_proj", "attention.output", hidden, self.heads, self.value_dim)
        if self.has_bias:
            yield WeightShape("self_attn.biases", "norm", (self.q_rank or 0) + latent + hidden)

    def kv_vectors(self, shares: Shares) -> tuple[int, int, int]:
        return 1, self.kv_rank, self.rope_dim

    def state_values(self, shares: Shares) -> int:
        return 0

    def flops_per_score(self, shares: Shares) -> tuple[float, float]:
        """Keys and values of prompts are expanded; single tokens are compared with the latent
        vectors themselves, with the expanding matrices absorbed into the queries."""
        heads = shares.heads(self.heads)
        expanded = 2.0 * heads * (self.nope_dim + self.rope_dim + self.value_dim)
        return expanded, 2.0 * heads * (2 * self.kv_rank + self.rope_dim)

    def activation_values(self, tp: int) -> float:
        expanded = self.heads * (2 * (self.nope_dim + self.rope_dim) + self.value_dim) / tp
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim + expanded

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """All ranks have the latent vectors whole."""
        latents = (self.q_rank or 0), self.kv_rank + self.rope_dim
        yield tuple(Shared(each) for each in latents if each)
        yield (Shared(self.heads * self.value_dim, by_heads=True),)
        yield (Shared(hidden),)

    def _by_heads(self, name: str, op: str, dim: int, inputs: int) -> WeightShape:
        return columns(name, op, self.heads, dim, inputs, self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The indexer that selects the keys of sparse latent attention (DeepSeek-V3.2, arXiv
    2512.02556). Every device of a tensor-parallel group has all of it.

    Args:
        heads, head_dim: of its queries, which are made of the latent ones; keys have one head.
        q_rank: of the latent queries.
    """

    heads: int
    head_dim: int
    q_rank: int
    window: int | None = None

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        queries = self.heads * self.head_dim
        yield whole("self_attn.indexer.wq_b", "attention.index_q", queries, self.q_rank)
        yield whole("self_attn.indexer.wk", "attention.index_kw", self.head_dim, hidden)
        yield whole("self_attn.indexer.weights_proj", "attention.index_kw", self.heads, hidden)
        yield WeightShape("self_attn.indexer.k_norm", "norm", 2 * self.head_dim)

    def kv_vectors(self, shares: Shares) -> tuple[int, int, int]:
        return 1, self.head_dim, 0

    def state_values(self, shares: Shares) -> int:
        return 0

    def flops_per_score(self, shares: Shares) -> tuple[float, float]:
        flops = 2.0 * self.heads * self.head_dim
        return flops, flops

    def activation_values(self, tp: int) -> float:
        return self.heads * (self.head_dim + 1) + self.head_dim

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        yield Shared(self.heads * self.head_dim), Shared(self.head_dim), Shared(self.heads)
