"""The recurrent layers of a model, and what they keep of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec, ScanSpec


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a layer keeps of a sequence, however long it is: float32 numbers in some shapes."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_values(self) -> int:
        return sum(map(prod, self.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceConfig:
    """Which layers are recurrent, and what they consist of: all of the same.

    These layers do not attend, unless they are ``parallel``: then they do both. ``scan`` and
    ``norm`` are None where there is only a convolution.
    """

    layers: tuple[int, ...]
    conv: ConvSpec
    scan: ScanSpec | DeltaSpec | None = None
    norm: GatedNormSpec | None = None
    conv_bias: bool = False
    proj_bias: bool = False
    parallel: bool = False

    @property
    def state(self) -> StateSpec:
        """What each of the layers keeps."""
        shapes = [self.conv.state]
        if self.scan is not None:
            shapes.append(self.scan.state)
        return StateSpec(tuple(shapes))
