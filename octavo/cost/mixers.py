"""What exchanges between positions in a layer: attention of several kinds, and recurrences.

All kinds have the methods of ``Mixer``. Sizes are in values, and of the whole model unless a
``Parallel`` is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from octavo.cost.weight_shape import Split, WeightShape


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

    def kv_vectors(self, tp: int) -> tuple[int, int, int]:
        """Heads, values of a key and values of a value that a device caches of each token."""
        ...

    def state_values(self, tp: int) -> int:
        """Values that a device keeps of each sequence, whatever its length."""
        ...

    def flops_per_score(self, tp: int) -> tuple[float, float]:
        """Operations of a device for one query and one key that it sees: when a prompt is computed,
        and for single tokens."""
        ...

    def activation_values(self, tp: int) -> float:
        """Values that a device makes of one token before it looks at others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention with as many keys and values as there are heads, or fewer.

    Args:
        qk_norm_size: values of both norms of queries and keys, 0 without.
        has_output_gate: queries come with as many values that gate the outputs (Qwen3-Next).
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
    num_sinks: int = 0

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        values = self.value_dim or self.head_dim
        gate = 2 if self.has_output_gate else 1
        for name, heads, dim in (
            ("q", self.heads, gate * self.head_dim),
            ("k", self.kv_heads, self.head_dim),
            ("v", self.kv_heads, values),
        ):
            yield _columns(f"self_attn.{name}_proj", "attention.qkv", heads, dim, hidden)
            if self.qkv_bias:
                yield _bias(f"self_attn.{name}_proj.bias", heads, dim)
        yield _rows("self_attn.o_proj", "attention.output", hidden, self.heads, values)
        if self.output_bias:
            yield WeightShape("self_attn.o_proj.bias", "norm", hidden)
        if self.qk_norm_size:
            yield WeightShape("self_attn.qk_norm", "norm", self.qk_norm_size)
        if self.num_sinks:
            yield _bias("self_attn.sinks", self.num_sinks, 1)

    def kv_vectors(self, tp: int) -> tuple[int, int, int]:
        return ceil(self.kv_heads / tp), self.head_dim, self.value_dim or self.head_dim

    def state_values(self, tp: int) -> int:
        return 0

    def flops_per_score(self, tp: int) -> tuple[float, float]:
        flops = 2.0 * ceil(self.heads / tp) * (self.head_dim + (self.value_dim or self.head_dim))
        return flops, flops

    def activation_values(self, tp: int) -> float:
        return (self.heads + 2 * self.kv_heads) * self.head_dim / tp


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one vector is cached for all
    heads, so that every device of a tensor-parallel group has to have it.

    Args:
        q_rank: of the queries' own latent vector; None where they are made in one step.
        kv_rank: of the latent vector that is cached; beside it are ``rope_dim`` values of position.
        nope_dim, rope_dim, value_dim: of a head.
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    window: int | None = None

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        query_dim = self.nope_dim + self.rope_dim
        if self.q_rank is None:
            yield _columns("self_attn.q_proj", "attention.q", self.heads, query_dim, hidden)
        else:
            yield _whole("self_attn.q_a_proj", "attention.qkv_a", self.q_rank, hidden)
            yield WeightShape("self_attn.q_a_layernorm", "norm", self.q_rank)
            yield _columns(
                "self_attn.q_b_proj", "attention.q_b", self.heads, query_dim, self.q_rank
            )
        latent = self.kv_rank + self.rope_dim
        yield _whole("self_attn.kv_a_proj_with_mqa", "attention.qkv_a", latent, hidden)
        yield WeightShape("self_attn.kv_a_layernorm", "norm", self.kv_rank)
        expanded = self.nope_dim + self.value_dim
        yield _columns("self_attn.kv_b_proj", "attention.kv_b", self.heads, expanded, self.kv_rank)
        yield _rows("self_attn.o_proj", "attention.output", hidden, self.heads, self.value_dim)

    def kv_vectors(self, tp: int) -> tuple[int, int, int]:
        return 1, self.kv_rank + self.rope_dim, 0

    def state_values(self, tp: int) -> int:
        return 0

    def flops_per_score(self, tp: int) -> tuple[float, float]:
        """Of prompts keys and values are expanded; single tokens are compared with the latent
        vectors themselves, and the matrices that expand them absorbed into the queries."""
        heads = ceil(self.heads / tp)
        expanded = 2.0 * heads * (self.nope_dim + self.rope_dim + self.value_dim)
        return expanded, 2.0 * heads * (2 * self.kv_rank + self.rope_dim)

    def activation_values(self, tp: int) -> float:
        expanded = self.heads * (2 * (self.nope_dim + self.rope_dim) + self.value_dim) / tp
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim + expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with a state of one matrix for a head (arXiv 2412.06464), as in Qwen3-Next.

    Args:
        heads: of values, whose number the state has.
        key_heads, key_dim, value_dim: of a head.
        kernel: positions that the convolution sees.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    window: int | None = None

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        keys, values = 2 * self.key_heads * self.key_dim, self.heads * self.value_dim
        for name, heads, size in (
            ("qk", self.key_heads, keys),
            ("v", self.heads, values),
            ("z", self.heads, values),
            ("ba", self.heads, 2 * self.heads),
        ):
            yield _columns(
                f"linear_attn.in_proj_{name}", "attention.linear_in", heads, size // heads, hidden
            )
        yield _bias("linear_attn.conv1d", self.key_heads, self._channels * self.kernel)
        yield _bias("linear_attn.dt_bias_A_log", self.heads, 2)
        yield WeightShape("linear_attn.norm", "norm", self.value_dim)
        yield _rows(
            "linear_attn.out_proj", "attention.linear_out", hidden, self.heads, self.value_dim
        )

    @property
    def _channels(self) -> int:
        """Of the convolution, for each head of keys."""
        return 2 * self.key_dim + self.heads * self.value_dim // self.key_heads

    def kv_vectors(self, tp: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def state_values(self, tp: int) -> int:
        convolution = ceil(self.key_heads / tp) * self._channels * (self.kernel - 1)
        return convolution + ceil(self.heads / tp) * self.key_dim * self.value_dim

    def flops_per_score(self, tp: int) -> tuple[float, float]:
        return 0.0, 0.0

    def activation_values(self, tp: int) -> float:
        return 2 * (self.key_heads * self.key_dim + self.heads * self.value_dim) / tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space (arXiv 2405.21060).

    Args:
        heads, head_dim: together the inner size.
        state_dim: of each value of a head. groups: of heads that share what reads the state.
        kernel: positions that the convolution sees.
        norm_size: of the gated norm before the output, 0 without.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    has_conv_bias: bool = True
    has_proj_bias: bool = False
    norm_size: int = 0
    window: int | None = None

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        inner = self.heads * self.head_dim
        for name, pieces, size in (
            ("zx", self.heads, 2 * inner),
            ("bc", self.groups, 2 * self.groups * self.state_dim),
            ("dt", self.heads, self.heads),
        ):
            yield _columns(
                f"mamba.in_proj_{name}", "attention.linear_in", pieces, size // pieces, hidden
            )
            if self.has_proj_bias:
                yield _bias(f"mamba.in_proj_{name}.bias", pieces, size // pieces)
        taps = self.kernel + (1 if self.has_conv_bias else 0)
        yield _bias("mamba.conv1d_x", self.heads, self.head_dim * taps)
        yield _bias("mamba.conv1d_bc", self.groups, 2 * self.state_dim * taps)
        yield _bias("mamba.A_D_dt", self.heads, 3)
        if self.norm_size:
            yield _bias("mamba.norm", self.heads, self.norm_size // self.heads)
        yield _rows("mamba.out_proj", "attention.linear_out", hidden, self.heads, self.head_dim)
        if self.has_proj_bias:
            yield WeightShape("mamba.out_proj.bias", "norm", hidden)

    def kv_vectors(self, tp: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def state_values(self, tp: int) -> int:
        inner = ceil(self.heads / tp) * self.head_dim
        shared = 2 * ceil(self.groups / tp) * self.state_dim
        return (inner + shared) * (self.kernel - 1) + inner * self.state_dim

    def flops_per_score(self, tp: int) -> tuple[float, float]:
        return 0.0, 0.0

    def activation_values(self, tp: int) -> float:
        return 2 * (self.heads * self.head_dim + self.groups * self.state_dim) / tp


def _columns(name: str, op: str, heads: int, dim: int, inputs: int) -> WeightShape:
    return WeightShape(name, "attention", heads * dim, inputs, op, Split.OUTPUTS, heads)


def _rows(name: str, op: str, outputs: int, heads: int, dim: int) -> WeightShape:
    return WeightShape(name, "attention", outputs, heads * dim, op, Split.INPUTS, heads)


def _whole(name: str, op: str, outputs: int, inputs: int) -> WeightShape:
    return WeightShape(name, "attention", outputs, inputs, op)


def _bias(name: str, heads: int, dim: int) -> WeightShape:
    """A vector that is cut as its heads are."""
    return WeightShape(name, "norm", heads * dim, split=Split.OUTPUTS, units=heads)
