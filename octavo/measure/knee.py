"""The knee of a throughput curve, from which on more load brings little.

It is found as in Satopää et al., "Finding a 'Kneedle' in a Haystack" (ICDCSW 2011): both axes are
scaled to 0…1, and the knee is the point that stands highest above the straight line from the first
point to the last. Here the axis of concurrency is logarithmic, as it is swept by doubling, and the
curve is that of the best throughput so far, as more load may well bring less.

A highest point always exists; a knee does not. A point that stands no higher than the noise of the
measurement is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from octavo.measure.statistics import MedianRange

# Share of the height of the whole curve by which a knee must stand out.
LEAST_HEIGHT = 0.05
# A curve that gains less than this in all is flat; one that gains as much by its last doubling is
# still rising.
LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of a curve, or why there is none.

    ``verdict``: "knee", "rising", "flat", "unclear" or "too few points". ``concurrency``: of the
    knee; of the first point if the curve is flat, which is all that is needed then; else None.
    ``share``: of the best throughput that it has. ``height``: of the highest point above the line,
    where the whole curve is 1 high.
    """

    verdict: str
    concurrency: int | None = None
    share: float | None = None
    height: float | None = None

    def __str__(self) -> str:
        if self.verdict == "knee":
            return (
                f"knee at {self.concurrency}: {self.share:.0%} of the best throughput; from there "
                "on more load brings less, and makes every request wait longer"
            )
        return {
            "rising": "no knee: throughput still rises at the last point; sweep further",
            "flat": f"flat: {self.concurrency} in flight give what more do",
            "unclear": "no clear knee: nothing stands out of the noise",
            "too few points": "no knee looked for: that takes three points",
        }[self.verdict]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_knee(concurrencies: Sequence[int], throughputs: Sequence[MedianRange]) -> Knee:
    """Return the knee of throughput against concurrency. Concurrencies rise; throughputs are above
    0."""
    if len(concurrencies) < 3:
        return Knee("too few points")
    medians = [spread.median for spread in throughputs]
    best = list(accumulate(medians, max))
    noise = statistics.median((spread.max - spread.min) / 2 for spread in throughputs)
    rise = best[-1] - best[0]
    if rise < max(LEAST_GAIN * best[0], 2 * noise):
        return Knee("flat", concurrencies[0], medians[0] / best[-1])

    steps = [math.log2(number) for number in concurrencies]
    heights = [
        (value - best[0]) / rise - (step - steps[0]) / (steps[-1] - steps[0])
        for step, value in zip(steps, best, strict=True)
    ]
    place = max(range(len(heights)), key=heights.__getitem__)
    if heights[place] >= max(LEAST_HEIGHT, noise / rise):
        share = medians[place] / best[-1]
        return Knee("knee", concurrencies[place], share, heights[place])
    doublings = steps[-1] - steps[-2]
    still_rises = best[-1] >= best[-2] * (1 + LEAST_GAIN) ** doublings
    return Knee("rising" if still_rises else "unclear", height=heights[place])
