"""What ops are told together."""

from __future__ import annotations

from typing import Any, NamedTuple


class RowNorm(NamedTuple):
    """An rmsnorm over a row: its weight, float32 [width], and the epsilon under its root."""

    weight: Any
    eps: float


class RopeArguments(NamedTuple):
    """Where tokens stand, int64 [T], and by what they are turned: as the op ``rope`` has it."""

    positions: Any
    cos_sin: Any
    interleaved: bool
