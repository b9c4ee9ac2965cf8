"""Specifications of the ops of recurrent layers: sizes, and the columns of their inputs.

A projection's outputs lie side by side in a row, and an op reads its columns from ``first`` on.
States are float32, whatever the activations are: they sum up over a whole text.

Each specification has ``state``, the shape of its state; ``width``, the columns that it makes;
``reads``, the columns that its inputs must have; and ``constants``, the sizes of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from octavo.kernels.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A depthwise causal convolution over ``kernel`` positions.

    A plain one is followed by silu. A ``gated`` one has three times as many columns (LFM2, arXiv
    2511.23404): the factors of its input, those of its output, and its input.
    """

    channels: int
    kernel: int
    first: int = 0
    gated: bool = False

    @property
    def state(self) -> tuple[int, ...]:
        """Inputs of the last positions, in order."""
        return self.kernel - 1, self.channels

    @property
    def width(self) -> int:
        return self.channels

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.first + self.channels * (3 if self.gated else 1),)

    @property
    def constants(self) -> tuple[int, ...]:
        """Sizes of weights and biases."""
        return self.channels * self.kernel, self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
    """The recurrence of Mamba 2 (arXiv 2405.21060), with one decay per head.

    Columns are x [heads, head_dim], then B and C [groups, state_dim] each. Those from ``first`` on
    of another row are a step size for each head, multiplied by ``step_scale`` and clamped to two
    limits.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    first: int
    step_min: float = 0.0
    step_max: float | None = None
    step_scale: float = 1.0

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.state_dim, self.head_dim

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of columns of x, B and C."""
        return self.width + 2 * self.groups * self.state_dim

    def channels_of(self, part: Part) -> Iterator[range]:
        """Yield the columns that the heads of a part read."""
        groups = part.of_kv_heads(self.heads, self.groups)
        yield _columns(part.of_heads(self.heads), self.head_dim)
        for first in self.width, self.width + self.groups * self.state_dim:
            yield _columns(groups, self.state_dim, first)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.channels, self.first + self.heads

    @property
    def constants(self) -> tuple[int, ...]:
        """Sizes of log decays, skip factors, and biases of step sizes."""
        return self.heads, self.heads, self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The gated delta rule (arXiv 2412.06464), as Qwen3-Next has it.

    Columns are queries and keys [key_heads, key_dim], then values [value_heads, value_dim]. Those
    of another row are two numbers for each value head: its write strength, and its decay. Each key
    head serves as many consecutive value heads.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def state(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def head_dim(self) -> int:
        return self.value_dim

    def channels_of(self, part: Part) -> Iterator[range]:
        """Yield the columns that the value heads of a part read."""
        key_heads, keys = (
            part.of_kv_heads(self.heads, self.key_heads),
            self.key_heads * self.key_dim,
        )
        for first in 0, keys:
            yield _columns(key_heads, self.key_dim, first)
        yield _columns(part.of_heads(self.heads), self.value_dim, 2 * keys)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.channels, 2 * self.value_heads

    @property
    def constants(self) -> tuple[int, ...]:
        """Sizes of log decays and their biases."""
        return self.value_heads, self.value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormSpec:
    """An rmsnorm over each ``group`` of columns, and a gate: silu of other columns from ``first``
    on, multiplied by ``gate_scale``.

    With ``gate_first`` the gate is multiplied before the norm (Mamba 2), else after it. Without
    ``normed`` there is only the gate.
    """

    width: int
    group: int
    eps: float
    first: int = 0
    gate_first: bool = False
    gate_scale: float = 1.0
    normed: bool = True

    @property
    def reads(self) -> tuple[int, ...]:
        return self.width, self.first + self.width

    @property
    def constants(self) -> tuple[int, ...]:
        if not self.normed:
            return ()
        return (self.width if self.gate_first else self.group,)


ScanningSpec: TypeAlias = ScanSpec | DeltaSpec
RecurrentSpec: TypeAlias = ConvSpec | ScanSpec | DeltaSpec | GatedNormSpec


def channels_of(conv: ConvSpec, scan: ScanningSpec | None, part: Part) -> list[range]:
    """Return the channels of a convolution that one rank computes: those that its heads of the scan
    behind it read, or a share of them where there is none. Ranges that touch are one."""
    if scan is None:
        return [
            part.of_rows(conv.channels) if part.divides(conv.channels) else range(conv.channels)
        ]
    joined: list[range] = []
    for channels in scan.channels_of(part):
        if joined and joined[-1].stop == channels.start:
            channels = range(joined.pop().start, channels.stop)
        joined.append(channels)
    return joined


def _columns(heads: range, size: int, first: int = 0) -> range:
    return range(first + heads.start * size, first + heads.stop * size)
