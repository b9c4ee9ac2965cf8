"""From steps that were timed to what steps take.

Least squares in which every step counts by its relative error, with coefficients that are not
negative (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). Steps that were
disturbed, by who knows what on a shared machine, are found by their residuals and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from octavo.base.errors import BenchmarkError
from octavo.cost.measured_steps import (
    MeasuredSteps,
    Spread,
    goes_on,
    pass_terms,
    regime_of,
    step_terms,
)
from octavo.cost.step_cost import StepFeatures

Array = NDArray[np.float64]

# A residual beyond so many times the median one is a disturbance, not a property of steps; and so
# is no step that took less than that many times as long: on a machine that others use, too, such
# steps come again, and belong to the mean.
_OUTLIER = 5.0
USUAL = 2.5
_ROUNDS = 4  # of leaving out
_LEAST_STEPS = 20
_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a step computed, pass after pass, and the seconds that it took."""

    passes: tuple[StepFeatures, ...]
    seconds: float

    def terms(self) -> Iterator[tuple[str, float]]:
        """What each coefficient is multiplied with; a name may come more than once."""
        yield from step_terms(self.passes[0].num_seqs)
        for features in self.passes:
            yield from pass_terms(features)


def fit(steps: Sequence[TimedStep], drift: float = 0.0) -> MeasuredSteps:
    """What the steps say of others. ``drift``: as of ``MeasuredSteps``.

    BenchmarkError: there are too few of them.
    """
    if len(steps) < _LEAST_STEPS:
        raise BenchmarkError(
            f"{len(steps)} steps are too few to learn from: {_LEAST_STEPS} and more are needed"
        )
    names = sorted({name for step in steps for name, _ in step.terms()})
    amounts = _amounts(steps, names)
    seconds = np.array([step.seconds for step in steps])
    scale, kept = seconds, np.ones(len(steps), dtype=bool)
    for _ in range(_ROUNDS):
        # Errors are relative to what is said, not to what came: else steps that chance made quick
        # would weigh most, and all would be said to be quicker than they are.
        relative, share = amounts / scale[:, None], seconds / scale
        coefficients = nonnegative_least_squares(relative[kept], share[kept])
        scale = np.maximum(amounts @ coefficients, _TOLERANCE)
        off = np.abs(np.log(seconds / scale))
        kept = off <= max(_OUTLIER * float(np.median(off)), log(USUAL))
    relative, share = amounts / scale[:, None], seconds / scale
    errors = _standard_errors(relative[kept], share[kept], coefficients)
    quotients = _quotients(relative, share, coefficients)
    passes = [features for step in steps for features in step.passes]
    most_rows = max(each.num_tokens for each in passes)
    seconds_of = dict(zip(names, coefficients.tolist(), strict=True))
    return MeasuredSteps(
        goes_on(seconds_of, most_rows, max(each.num_sampled for each in passes)),
        _spreads(steps, quotients),
        most_rows=most_rows,
        most_seqs=max(each.num_seqs for each in passes),
        most_keys=max(each.decode_keys + each.prompt_keys for each in passes),
        drift=drift,
        errors_of=dict(zip(names, errors.tolist(), strict=True)),
    )


def usual(seconds: float, said: float) -> bool:
    """Whether a step took about as long as is said of it, and was not disturbed."""
    return said / USUAL <= seconds <= said * USUAL


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """The x >= 0 for which |a x - b| is least: float64 [n], of a [m, n] and b [m]."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    count = a.shape[1]
    x, is_free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = a.T @ (b - a @ x)
        gradient[is_free] = -np.inf
        if is_free.all() or gradient.max() <= _TOLERANCE * len(b):
            break
        is_free[int(gradient.argmax())] = True
        x = _step_to_best(a, b, x, is_free)
    return x / scale


def _step_to_best(a: Array, b: Array, x: Array, is_free: NDArray[np.bool_]) -> Array:
    """From x towards the best of the free coefficients; what would become negative on the way is
    held at 0."""
    while True:
        best = np.zeros_like(x)
        best[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        falls = is_free & (best <= 0)
        if not falls.any():
            return best
        x = x + (x[falls] / np.maximum(x[falls] - best[falls], _TOLERANCE)).min() * (best - x)
        is_free &= x > _TOLERANCE
        x[~is_free] = 0.0


def _amounts(steps: Sequence[TimedStep], names: Sequence[str]) -> Array:
    places = {name: place for place, name in enumerate(names)}
    amounts = np.zeros((len(steps), len(names)))
    for row, step in zip(amounts, steps, strict=True):
        for name, amount in step.terms():
            row[places[name]] += amount
    return amounts


def _standard_errors(relative: Array, share: Array, coefficients: Array) -> Array:
    """Of those that are not at 0; for the others there is none, and 0 is said."""
    errors = np.zeros_like(coefficients)
    is_free = coefficients > 0
    a = relative[:, is_free]
    residual = a @ coefficients[is_free] - share
    freedom = max(1, len(a) - a.shape[1])
    covariance = np.linalg.pinv(a.T @ a) * float(residual @ residual) / freedom
    errors[is_free] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return errors


def _quotients(relative: Array, share: Array, coefficients: Array) -> Array:
    """What each step took, to what would be said of it had it not been seen: residuals are as much
    larger as a step has pulled the line towards itself (its leverage)."""
    q, _ = np.linalg.qr(relative[:, coefficients > 0])
    leverage = np.minimum((q * q).sum(axis=1), 0.9)
    said = share - (share - relative @ coefficients) / (1 - leverage)
    return share / np.maximum(said, 1e-3)


def _spreads(steps: Sequence[TimedStep], quotients: Array) -> dict[str, Spread]:
    """By regime; ``quotients``: of what steps took and what is said of them."""
    spreads = {}
    regimes = [regime_of(step.passes[0]) for step in steps]
    for regime in sorted(set(regimes)):
        own = [
            quotient
            for each, quotient in zip(regimes, quotients.tolist(), strict=True)
            if each == regime
        ]
        low, high = np.percentile(own, [5, 95]).tolist()
        spreads[regime] = Spread(low, high)
    return spreads
