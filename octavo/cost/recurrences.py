"""Recurrent mixers, which keep a state in place of KV: linear attention, state spaces, short
convolutions. All are a ``Mixer``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from octavo.cost.exchange import Meeting, Shared
from octavo.cost.shares import Shares
from octavo.cost.weight_shape import WeightShape, columns, rows, vector, whole


class StatePart(NamedTuple):
    """Values of a state in pieces that are never cut: one for each head, or for each group of
    heads, which several ranks have if their heads read it."""

    pieces: int
    values: int  # of each
    is_of_groups: bool = False


class Recurrence:
    """Keeps nothing of a token, and looks at none again."""

    __slots__ = ()

    @property
    def heads(self) -> int:
        """Pieces of the mixer that are never cut."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Outputs of all heads, for a token."""
        raise NotImplementedError

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """Parts of the state of a sequence."""
        raise NotImplementedError

    @property
    def activations(self) -> int:
        """Values of one token, on all devices together."""
        raise NotImplementedError

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        raise NotImplementedError

    def state_values(self, shares: Shares) -> int:
        return sum(
            values
            * (shares.kv_heads(self.heads, pieces) if is_of_groups else shares.pieces(pieces))
            for pieces, values, is_of_groups in self.state_parts
        )

    def activation_values(self, tp: int) -> float:
        return self.activations / tp

    @property
    def window(self) -> int | None:
        return None

    def kv_vectors(self, shares: Shares) -> tuple[int, int, int]:
        return 0, 0, 0

    def flops_per_score(self, shares: Shares) -> tuple[float, float]:
        return 0.0, 0.0

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """Outputs of all projections, those of one product at once, and before the last of them
        what the heads have made."""
        matrices = [weight for weight in self.weights(hidden) if weight.inputs]
        *opening, closing = (
            [weight.outputs for weight in product]
            for _, product in groupby(matrices, key=lambda weight: weight.op)
        )
        yield from map(self.linears, opening)
        yield (self.mixed(),)
        yield self.linears(closing)

    def mixed(self) -> Shared:
        """Return what goes into the last projection."""
        return Shared(self.width, by_heads=True)

    def linears(self, widths: list[int]) -> Meeting:
        """The outputs of one product, of which ``widths`` has the parts: each a matrix of its own
        unless a mixer says otherwise."""
        return tuple(map(Shared, widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(Recurrence):
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

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        keys, values = 2 * self.key_heads * self.key_dim, self.heads * self.value_dim
        for name, heads, size in (
            ("qk", self.key_heads, keys),
            ("v", self.heads, values),
            ("z", self.heads, values),
            ("ba", self.heads, 2 * self.heads),
        ):
            yield columns(
                f"linear_attn.in_proj_{name}", "attention.linear_in", heads, size // heads, hidden
            )
        yield vector("linear_attn.conv1d", self.key_heads, self._channels * self.kernel)
        yield vector("linear_attn.dt_bias_A_log", self.heads, 2)
        yield WeightShape("linear_attn.norm", "norm", self.value_dim)
        yield rows(
            "linear_attn.out_proj", "attention.linear_out", hidden, self.heads, self.value_dim
        )

    def linears(self, widths: list[int]) -> Meeting:
        """Queries, keys and values are of one matrix."""
        return super(GatedDeltaNet, self).linears([sum(widths[:2]), *widths[2:]])

    @property
    def _channels(self) -> int:
        """Channels of the convolution for each key head."""
        return 2 * self.key_dim + self.width // self.key_heads

    @property
    def width(self) -> int:
        return self.heads * self.value_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        kept = self.kernel - 1
        return (
            StatePart(self.key_heads, 2 * self.key_dim * kept, is_of_groups=True),
            StatePart(self.heads, self.value_dim * (kept + self.key_dim)),
        )

    @property
    def activations(self) -> int:
        return 2 * (self.key_heads * self.key_dim + self.heads * self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Recurrence):
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

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        inner = self.heads * self.head_dim
        for name, pieces, size in (
            ("zx", self.heads, 2 * inner),
            ("bc", self.groups, 2 * self.groups * self.state_dim),
            ("dt", self.heads, self.heads),
        ):
            yield columns(
                f"mamba.in_proj_{name}", "attention.linear_in", pieces, size // pieces, hidden
            )
            if self.has_proj_bias:
                yield vector(f"mamba.in_proj_{name}.bias", pieces, size // pieces)
        taps = self.kernel + (1 if self.has_conv_bias else 0)
        yield vector("mamba.conv1d_x", self.heads, self.head_dim * taps)
        yield vector("mamba.conv1d_bc", self.groups, 2 * self.state_dim * taps)
        yield vector("mamba.A_D_dt", self.heads, 3)
        if self.norm_size:
            yield vector("mamba.norm", self.heads, self.norm_size // self.heads)
        yield rows("mamba.out_proj", "attention.linear_out", hidden, self.heads, self.head_dim)
        if self.has_proj_bias:
            yield WeightShape("mamba.out_proj.bias", "norm", hidden)

    def linears(self, widths: list[int]) -> Meeting:
        """All that comes before the convolution is of one matrix."""
        return super(Mamba2, self).linears([sum(widths)])

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        kept = self.kernel - 1
        own = self.head_dim * (kept + self.state_dim)
        return (
            StatePart(self.heads, own),
            StatePart(self.groups, 2 * self.state_dim * kept, is_of_groups=True),
        )

    @property
    def activations(self) -> int:
        return 2 * (self.heads * self.head_dim + self.groups * self.state_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(Recurrence):
    """The first selective state space (arXiv 2312.00752), as in Mamba, Falcon-Mamba and Jamba.

    Args:
        inner: values that have a state each, of ``state_dim``.
        step_rank: of what makes the step sizes.
        kernel: positions that the convolution sees.
        has_norms: of the step sizes, and of what writes and reads the states (Jamba).
    """

    inner: int
    state_dim: int
    step_rank: int
    kernel: int
    has_conv_bias: bool = True
    has_proj_bias: bool = False
    has_norms: bool = False

    @property
    def heads(self) -> int:
        return self.inner

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        small = self.step_rank + 2 * self.state_dim
        yield columns("mamba.in_proj", "attention.linear_in", self.inner, 2, hidden)
        yield rows("mamba.x_proj", "attention.linear_x", small, self.inner, 1)
        yield columns("mamba.dt_proj", "attention.linear_dt", self.inner, 1, self.step_rank)
        yield vector("mamba.dt_proj.bias_D", self.inner, 2)
        yield vector("mamba.A_log", self.inner, self.state_dim)
        yield vector("mamba.conv1d", self.inner, self.kernel + (1 if self.has_conv_bias else 0))
        if self.has_norms:
            yield WeightShape("mamba.norms", "norm", small)
        yield rows("mamba.out_proj", "attention.linear_out", hidden, self.inner, 1)
        if self.has_proj_bias:
            yield vector("mamba.in_proj.bias", self.inner, 2)
            yield WeightShape("mamba.out_proj.bias", "norm", hidden)

    @property
    def width(self) -> int:
        return self.inner

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return (StatePart(self.inner, self.kernel - 1 + self.state_dim),)

    @property
    def activations(self) -> int:
        return 3 * self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(Recurrence):
    """The delta rule with a gate for each channel (Kimi Linear, arXiv 2510.26692).

    Args:
        head_dim: of keys and values, and the rank of both gates.
        kernel: positions that the convolutions of queries, keys and values see.
        has_full_gate: the gate of the outputs is made in one step (Kimi K3).
    """

    heads: int
    head_dim: int
    kernel: int
    has_full_gate: bool = False

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        for name in ("q", "k", "v"):
            full = f"self_attn.{name}_proj"
            yield columns(full, "attention.linear_in", self.heads, self.head_dim, hidden)
        yield columns("self_attn.b_proj", "attention.linear_in", self.heads, 1, hidden)
        if self.has_full_gate:
            yield columns(
                "self_attn.g_proj", "attention.linear_in", self.heads, self.head_dim, hidden
            )
        for name in ("f",) if self.has_full_gate else ("f", "g"):
            yield whole(f"self_attn.{name}_a_proj", "attention.linear_in", self.head_dim, hidden)
            yield columns(
                f"self_attn.{name}_b_proj",
                "attention.linear_gates",
                self.heads,
                self.head_dim,
                self.head_dim,
            )
        yield vector("self_attn.conv1d", self.heads, 3 * self.head_dim * self.kernel)
        yield vector("self_attn.dt_bias_A_log", self.heads, self.head_dim + 1)
        yield WeightShape("self_attn.o_norm", "norm", self.head_dim)
        yield rows("self_attn.o_proj", "attention.linear_out", hidden, self.heads, self.head_dim)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return (StatePart(self.heads, self.head_dim * (3 * (self.kernel - 1) + self.head_dim)),)

    @property
    def activations(self) -> int:
        return 5 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttention(Recurrence):
    """Linear attention with a fixed decay for each head (arXiv 2501.08313), as in MiniMax-01."""

    heads: int
    head_dim: int

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        dim = self.head_dim
        yield columns("self_attn.qkv_proj", "attention.linear_in", self.heads, 3 * dim, hidden)
        yield columns("self_attn.output_gate", "attention.linear_in", self.heads, dim, hidden)
        yield vector("self_attn.norm", self.heads, dim)
        yield rows("self_attn.out_proj", "attention.linear_out", hidden, self.heads, dim)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return (StatePart(self.heads, self.head_dim**2),)

    @property
    def activations(self) -> int:
        return 4 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(Recurrence):
    """A convolution between two gates (LFM2, arXiv 2511.23404).

    Args:
        size: of each position. kernel: positions that it sees.
    """

    size: int
    kernel: int
    has_bias: bool = False

    @property
    def heads(self) -> int:
        return self.size

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        yield columns("conv.in_proj", "attention.linear_in", self.size, 3, hidden)
        yield vector("conv.conv", self.size, self.kernel + (1 if self.has_bias else 0))
        yield rows("conv.out_proj", "attention.linear_out", hidden, self.size, 1)
        if self.has_bias:
            yield vector("conv.in_proj.bias", self.size, 3)
            yield WeightShape("conv.out_proj.bias", "norm", hidden)

    @property
    def width(self) -> int:
        return self.size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return (StatePart(self.size, self.kernel - 1),)

    def state_values(self, shares: Shares) -> int:
        return shares.channels(self.size) * (self.kernel - 1)

    def mixed(self) -> Shared:
        """Channels are no heads: ranks have tiles of them, as of the outputs of matrices."""
        return Shared(self.size)

    @property
    def activations(self) -> int:
        return 3 * self.size
