"""What a step costs, learned from the steps that were run.

Whether a guess pays depends on what one more row adds to a step, and that is a matter of the
machine, the model, the weights' format and how many rows there are already. So it is measured:
steps that decode and verify are timed by their number of rows.

A straight line through all of them tells of rows that were never seen, and each number of rows has
a mean of its own, that counts as far as it was seen lately. So kernels may cost what they like by
rows, and one step that was disturbed is not held against its number of rows for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.batch import Batch

MAX_ROWS = 256  # of a step; beyond, nobody guesses
# What one more row adds to a step of one, before anything has been measured; as much weight as
# some steps has it after that.
ROW_COST = 0.2
_PRIOR_STEPS = 2.0
_PRIOR_SPREAD = 1.0  # of their rows, as a variance
_KEPT = 0.98  # of what is known, after each step
_OUTLIER = 3.0  # a step that takes so many times as long as expected was disturbed


@dataclass(slots=True)
class _Mean:
    """A mean in which the later values count more."""

    value: float = 0.0
    weight: float = 0.0
    step: int = 0  # of the last value

    def take(self, value: float, step: int) -> None:
        weight = self.weight_at(step)
        self.value = (weight * self.value + value) / (weight + 1)
        self.weight, self.step = weight + 1, step

    def weight_at(self, step: int) -> float:
        """In steps that were seen just now."""
        return self.weight * float(_KEPT ** (step - self.step))


class StepTimeEstimator:
    """Seconds of steps that decode and verify, by their rows."""

    def __init__(self) -> None:
        self._step = 0
        self._by_rows: dict[int, _Mean] = {}
        # Of rows x and seconds y, the later the more: their number, means, and products.
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any step has been timed."""
        return self._step > 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step took so long. Nothing is learned of those with prompts or rounds in them."""
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
        """Of a step of so many rows; in steps of one row, as long as none has been timed."""
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
