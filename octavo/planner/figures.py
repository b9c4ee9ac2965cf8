"""Figures in reasons, gains and JSON."""

from __future__ import annotations

import math
from typing import Any

from octavo.base.json_values import finite_or_none
from octavo.cost.prediction import Prediction


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, with the digits that matter."""
    if not math.isfinite(seconds):
        return "without end"
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2
    return f"{seconds * 1e3:,.{digits}f} ms"


def figure_json(prediction: Prediction, unit: float = 1.0) -> dict[str, Any]:
    """Return a prediction times ``unit``; infinity is null, which JSON has instead."""
    return {
        name: value if isinstance(value, str) else finite_or_none(value)
        for name, value in (prediction * unit).as_json().items()
    }


def ms_json(seconds: Prediction) -> dict[str, Any]:
    return figure_json(seconds, 1e3)
