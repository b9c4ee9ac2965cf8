"""Estimates the seconds of a step by its rows, learned from the steps that were run.

Whether a draft pays depends on what one more row adds to a step, and that depends on the machine,
the model, the weights' format and the number of rows. So it is measured: steps that decode and
verify are timed by their rows.

Each number of rows has a mean of its own, which weighs as much as it was seen lately; a straight
line through all steps is its prior, and the estimate of rows that were never seen. So times may
depend on the number of rows in any way, and one disturbed step is forgotten in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.batch import Batch

MAX_ROWS = 256  # larger steps are not timed
# The prior of what one more row adds to a step of one row. It weighs as so many steps with such a
# variance of their rows.
ROW_COST = 0.2
_PRIOR_STEPS = 2.0
_PRIOR_SPREAD = 1.0
_KEPT = 0.98  # decay of the sums with each step
_OUTLIER = 3.0  # times are cut at so many times the estimate


@dataclass(slots=True)
class _Mean:
    """An exponentially decaying mean."""

    value: float = 0.0
    weight: float = 0.0
    step: int = 0  # of the last value

    def take(self, value: float, step: int) -> None:
        weight = self.weight_at(step)
        self.value = (weight * self.value + value) / (weight + 1)
        self.weight, self.step = weight + 1, step

    def weight_at(self, step: int) -> float:
        """Weight of the mean at a step, in values taken at that step."""
        return self.weight * float(_KEPT ** (step - self.step))


class StepTimeEstimator:
    """Estimated seconds of steps that decode and verify, by their rows."""

    def __init__(self) -> None:
        self._step = 0
        self._by_rows: dict[int, _Mean] = {}
        # Decaying sums over steps of rows x and seconds y: the count, x, y, x * x and x * y.
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """True if a step has been timed."""
        return self._step > 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """Take in the seconds of a step, unless it has prompt tokens or multi-step items."""
        rows = 0
        for item in batch.items:
            if item.num_sampled != item.num_tokens:
                return
            rows += item.num_tokens
        if not 0 < rows <= MAX_ROWS:
            return
        if self.is_known:
            seconds = min(seconds, _OUTLIER * self.seconds(rows))
        self._step += 1
        self._by_rows.setdefault(rows, _Mean()).take(seconds, self._step)
        for name, value in (
            ("_count", 1.0),
            ("_x", rows),
            ("_y", seconds),
            ("_xx", rows * rows),
            ("_xy", rows * seconds),
        ):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    def seconds(self, rows: int) -> float:
        """Estimated seconds of a step of ``rows``; before any was timed, in steps of one row."""
        if not self.is_known:
            return 1.0 + ROW_COST * (rows - 1)
        line = self._on_the_line(rows)
        mean = self._by_rows.get(rows)
        if mean is None:
            return line
        weight = mean.weight_at(self._step)
        return (weight * mean.value + _PRIOR_STEPS * line) / (weight + _PRIOR_STEPS)

    def _on_the_line(self, rows: int) -> float:
        x, y = self._x / self._count, self._y / self._count
        spread = self._xx - self._count * x * x
        covariance = self._xy - self._count * x * y
        expected = ROW_COST * y / (1.0 + ROW_COST * (x - 1.0))  # seconds a row
        prior = _PRIOR_STEPS * _PRIOR_SPREAD
        slope = max(0.0, (covariance + prior * expected) / (spread + prior))
        return max(y + slope * (rows - x), 0.1 * y)
