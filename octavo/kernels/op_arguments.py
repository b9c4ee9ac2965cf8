"""Arguments that several ops take, grouped."""

from __future__ import annotations

from typing import Any, NamedTuple


class RowNorm(NamedTuple):
    """An rmsnorm over a row: its weight [width], with Gemma's 1 already added, and its epsilon."""

    weight: Any
    eps: float


class RopeArguments(NamedTuple):
    """Positions of tokens, int64 [T], and the rotation for them, as the op ``rope`` takes it."""

    positions: Any
    cos_sin: Any
    interleaved: bool
