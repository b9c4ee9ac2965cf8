"""Configuration of a model's recurrent layers, and the size of the state of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from math import prod

from octavo.kernels.parts import Part
from octavo.kernels.recurrence_specs import (
    ConvSpec,
    DeltaSpec,
    GatedNormSpec,
    ScanSpec,
    channels_of,
)

_LINE_FLOATS = 16
MAX_KERNEL = 16  # positions of a convolution, as the native kernels have it


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of a sequence in one recurrent layer: float32 arrays whose size does not depend on
    the length of the sequence."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of floats of each array, rounded up to whole cache lines."""
        return tuple(-(-prod(shape) // _LINE_FLOATS) * _LINE_FLOATS for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        return 4 * sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceConfig:
    """The recurrent layers of a model, and the parts of each of them.

    These layers have no attention, unless they are ``parallel``: then they have both. A convolution
    is followed by ``mamba`` or ``delta`` and a norm, or by nothing. ``mamba_scales`` are the
    factors of x, B and C before the convolution.
    """

    layers: tuple[int, ...]
    conv: ConvSpec
    mamba: ScanSpec | None = None
    delta: DeltaSpec | None = None
    norm: GatedNormSpec | None = None
    conv_bias: bool = False
    proj_bias: bool = False
    parallel: bool = False
    mamba_scales: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def channel_scales(self) -> tuple[float, ...]:
        """Factor of each input channel of Mamba 2's convolution."""
        assert self.mamba is not None
        shared = self.mamba.groups * self.mamba.state_dim
        counts = self.mamba.width, shared, shared
        return tuple(chain(*map(repeat, self.mamba_scales, counts)))

    @property
    def scan(self) -> ScanSpec | DeltaSpec | None:
        """The recurrence that follows the convolution, if there is one."""
        return self.mamba or self.delta

    def state(self, part: Part) -> StateSpec:
        """Return the state that each of the recurrent layers has on one rank."""
        channels = sum(map(len, channels_of(self.conv, self.scan, part)))
        positions, _ = self.conv.state
        shapes: list[tuple[int, ...]] = [(positions, channels)]
        if self.scan is not None:
            _, *of_a_head = self.scan.state
            shapes.append((len(part.of_heads(self.scan.heads)), *of_a_head))
        return StateSpec(tuple(shapes))

    def fault(self, num_layers: int) -> str | None:
        """Describes what does not fit together; None if everything does."""
        layers, conv, scan, norm = set(self.layers), self.conv, self.scan, self.norm
        if list(self.layers) != sorted(layers) or not layers <= set(range(num_layers)):
            return f"layers {self.layers} are no {len(self.layers)} of {num_layers}"
        if len(layers) == num_layers and not self.parallel:
            return "no layer attends"
        if not 2 <= conv.kernel <= MAX_KERNEL:
            return f"a convolution over {conv.kernel} positions: 2 to {MAX_KERNEL} are possible"
        if conv.channels < 1 or conv.first < 0:
            return f"a convolution of {conv.channels} channels from {conv.first} on"
        if len(self.mamba_scales) != 3:
            return f"{len(self.mamba_scales)} scales of x, B and C"
        if scan is None or norm is None:
            return None if conv.gated and scan is norm is None else "a norm follows a recurrence"
        return _fault_of_scan(conv, scan) or _fault_of_norm(norm, scan)


def _fault_of_scan(conv: ConvSpec, scan: ScanSpec | DeltaSpec) -> str | None:
    heads, shared = _heads(scan)
    if shared < 1 or heads < 1 or heads % shared:
        return f"{heads} heads cannot be shared out to {shared}"
    first = scan.first if isinstance(scan, ScanSpec) else 0
    if conv.gated or conv.channels != scan.channels or min(*scan.state, first + 1) < 1:
        return f"{conv.channels} channels for a recurrence of {scan.channels}"
    return None


def _fault_of_norm(norm: GatedNormSpec, scan: ScanSpec | DeltaSpec) -> str | None:
    if norm.width != scan.width or norm.group < 1 or norm.width % norm.group or norm.first < 0:
        return f"a norm of {norm.width} values in groups of {norm.group}, from {norm.first} on"
    return None


def _heads(scan: ScanSpec | DeltaSpec) -> tuple[int, int]:
    """Number of heads, and number of heads or groups that they share."""
    if isinstance(scan, ScanSpec):
        return scan.heads, scan.groups
    return scan.value_heads, scan.key_heads
