"""Figures as reasons, gains and JSON say them."""

from __future__ import annotations

import math
from typing import Any

from octavo.cost.prediction import Prediction


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def ms(seconds: float) -> str:
    """Of seconds, with as many digits as tell apart what matters."""
    if not math.isfinite(seconds):
        return "without end"
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2
    return f"{seconds * 1e3:,.{digits}f} ms"


def figure_json(prediction: Prediction, unit: float = 1.0) -> dict[str, Any]:
    """Of so many units each; what has no end is null, as JSON knows no infinity."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else None
        for name, value in (prediction * unit).as_json().items()
    }


def ms_json(seconds: Prediction) -> dict[str, Any]:
    return figure_json(seconds, 1e3)
