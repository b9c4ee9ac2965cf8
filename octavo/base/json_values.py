"""Values that JSON can hold."""

from __future__ import annotations

import math


def finite_or_none(value: float | None) -> float | None:
    """Return a number, or None for infinity and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
