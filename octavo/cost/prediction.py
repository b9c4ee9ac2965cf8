"""``Prediction``: a predicted figure, with its interval and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["measured", "interpolated", "extrapolated", "roofline", "published"]

# From the best known to the least: what is made of several parts is known as its worst part is.
_BY_TRUST: tuple[Source, ...] = (
    "measured",
    "interpolated",
    "published",
    "roofline",
    "extrapolated",
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A value that lies between ``low`` and ``high`` nine times out of ten, as far as is known.

    ``source``: measured here; between measurements (interpolated) or beyond them (extrapolated);
    from ceilings of the hardware and shares of them that are usual (roofline); from elsewhere
    (published).
    """

    value: float
    low: float
    high: float
    source: Source

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} does not lie between {self.low} and {self.high}")

    @classmethod
    def around(cls, value: float, share: float, source: Source) -> Prediction:
        """Give or take a share of the value, which is not negative: 0.1 is ten per cent."""
        return cls(value, value / (1 + share), value * (1 + share), source)

    @classmethod
    def sure(cls, value: float, source: Source = "published") -> Prediction:
        """A prediction that is certain."""
        return cls(value, value, value, source)

    def map(self, function: Callable[[float], float]) -> Prediction:
        """The prediction of a monotonic function of this one."""
        ends = function(self.low), function(self.high)
        return Prediction(function(self.value), min(ends), max(ends), self.source)

    def __add__(self, other: Prediction) -> Prediction:
        """The sum of predictions whose errors may all have one direction."""
        return Prediction(
            self.value + other.value,
            self.low + other.low,
            self.high + other.high,
            self.source if self.source == other.source else worst((self.source, other.source)),
        )

    def __mul__(self, factor: float) -> Prediction:
        low, high = self.low * factor, self.high * factor
        if low > high:
            low, high = high, low
        return Prediction(self.value * factor, low, high, self.source)

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "source": self.source}


def worst(sources: Iterable[Source]) -> Source:
    """The source of a figure that is made of parts."""
    return max(sources, key=_BY_TRUST.index)
