"""Fits step times to measured steps.

Least squares in which every step counts by its relative error, with coefficients that are not
negative (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). Steps that were
disturbed, as happens on a shared machine, are found by their residuals and left out.
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

# A residual beyond _OUTLIER times the median one is a disturbance, not a property of steps; but a
# step within USUAL times its prediction never is: on a shared machine such steps come again, and
# belong to the mean.
_OUTLIER = 5.0
USUAL = 2.5
_ROUNDS = 4  # of leaving out
_LEAST_STEPS = 20
_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A measured step: the features of its passes, one after the other, and its seconds."""

    passes: tuple[StepFeatures, ...]
    seconds: float

    def terms(self) -> Iterator[tuple[str, float]]:
        """Yields the factor of each coefficient; a name may come more than once."""
        yield from step_terms(self.passes[0].num_seqs)
        for features in self.passes:
            yield from pass_terms(features)


def fit(steps: Sequence[TimedStep], drift: float = 0.0) -> MeasuredSteps:
    """Fit step times to measured steps. ``drift``: as of ``MeasuredSteps``.

    Raises:
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
        # Errors are relative to the prediction, not to the measurement: else steps that chance made
        # quick would weigh most, and all predictions would be too low.
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
    """True if a step took about as long as predicted, and was not disturbed."""
    return said / USUAL <= seconds <= said * USUAL


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """Return the x >= 0 for which |a x - b| is least: float64 [n], of a [m, n] and b [m]."""
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
    """Move from x towards the best of the free coefficients; those that would become negative on
    the way are held at 0."""
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
    """Standard errors of coefficients above 0; 0 for the others."""
    errors = np.zeros_like(coefficients)
    is_free = coefficients > 0
    a = relative[:, is_free]
    residual = a @ coefficients[is_free] - share
    freedom = max(1, len(a) - a.shape[1])
    covariance = np.linalg.pinv(a.T @ a) * float(residual @ residual) / freedom
    errors[is_free] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return errors


def _quotients(relative: Array, share: Array, coefficients: Array) -> Array:
    """Time of each step over its prediction by the others: residuals are larger by the leverage
    with which a step has pulled the line towards itself."""
    q, _ = np.linalg.qr(relative[:, coefficients > 0])
    leverage = np.minimum((q * q).sum(axis=1), 0.9)
    said = share - (share - relative @ coefficients) / (1 - leverage)
    return share / np.maximum(said, 1e-3)


def _spreads(steps: Sequence[TimedStep], quotients: Array) -> dict[str, Spread]:
    """Spreads by regime; ``quotients``: of the time of steps and their predictions."""
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
