"""A mean with its standard error."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A figure with its standard error, which is None for less than two values."""

    value: float
    stderr: float | None

    @classmethod
    def mean_of(cls, values: np.ndarray) -> Estimate:
        """Return the mean. Its standard error treats the values, one a token, as independent."""
        return cls(float(values.mean()), standard_error(values))

    def exp(self) -> Estimate:
        """Return e to the power of the estimate; the error to first order."""
        value = math.exp(self.value)
        return Estimate(value, None if self.stderr is None else value * self.stderr)

    def as_json(self, name: str, stderr_name: str | None = None) -> dict[str, float | None]:
        return {name: self.value, stderr_name or f"{name}_stderr": self.stderr}


def standard_error(values: np.ndarray) -> float | None:
    """Standard error of the mean: sqrt((E[x^2] - E[x]^2) / (n - 1)), computed from deviations."""
    if len(values) < 2:
        return None
    return float(values.std() / math.sqrt(len(values) - 1))
