"""Medians, percentiles and intervals for all benchmarks."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

S = TypeVar("S")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, by linear interpolation between the two nearest ranks; exact, from all
    values.

    ``percent`` is 0 to 100. The same as numpy's default ("linear", type 7 of Hyndman and Fan 1996).

    Raises:
        ValueError: there are no values, or the percentage is out of range.
    """
    if not values:
        raise ValueError("a percentile of nothing")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is from 0 to 100, not {percent}")
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean_or_percentile(values: Sequence[float], percent: float | None) -> float:
    """Return a percentile of some values; their mean for None."""
    return sum(values) / len(values) if percent is None else percentile(values, percent)


@dataclass(frozen=True, slots=True)
class MedianRange:
    """The median and the range of a figure over repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MedianRange:
        return cls(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    def scaled(self, factor: float) -> MedianRange:
        return MedianRange(self.median * factor, self.min * factor, self.max * factor)


class OverSamples(Generic[S]):
    """A figure of a result that has ``samples``: the median and the range of a figure of these."""

    def __init__(self, figure: Callable[[S], float]):
        self._figure = figure

    def __get__(self, result: Any, owner: type) -> MedianRange:
        return MedianRange.of([self._figure(sample) for sample in result.samples])


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the interval of a share (Wilson 1927), by default for 95 %: sound for few trials, and
    for shares near 0 and 1. (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    middle = share + z * z / (2 * trials)
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def resamples(count: int, rounds: int = 200, seed: int = 0) -> list[list[int]]:
    """Return, for each round, the indices of ``count`` values that are drawn from as many, with
    replacement. The same seed gives the same ones."""
    draws, indices = random.Random(seed), list(range(count))
    return [draws.choices(indices, k=count) for _ in range(rounds)]


def bootstrap(
    values: Sequence[float],
    statistics: Mapping[str, Callable[[Sequence[float]], float]],
    samples: Iterable[Iterable[int]],
    *,
    confidence: float = 0.95,
) -> dict[str, tuple[float, float]]:
    """Return the percentile intervals of statistics over samples, as ``resamples`` draws them
    (Efron 1979). Statistics are given a sample in ascending order."""
    found: dict[str, list[float]] = {name: [] for name in statistics}
    for drawn in samples:
        sample = sorted([values[index] for index in drawn])
        for name, statistic in statistics.items():
            found[name].append(statistic(sample))
    tail = (1 - confidence) / 2 * 100
    return {
        name: (percentile(each, tail), percentile(each, 100 - tail)) for name, each in found.items()
    }


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    confidence: float = 0.95,
    rounds: int = 200,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the interval of one statistic; see ``bootstrap``."""
    samples = resamples(len(values), rounds, seed)
    return bootstrap(values, {"": statistic}, samples, confidence=confidence)[""]
