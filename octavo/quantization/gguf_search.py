"""Searches for the scales of quantized blocks: the least weighted squared error.

A block's values are a scale times a level, ``x = a * L``, or that plus an offset, ``x = a * q + b``.
Which level is best follows from the scale, and which scale is best from the levels (it is then a
least-squares fit), so a search tries scales, rounds, refits, and keeps the best; as k-means does.
A super-block shares one or two float16 numbers among its sub-blocks, whose own scales are small
integers: these are searched in the same way, with all levels rounded again at each trial.

Tensors here have the values of a sub-block first, ``[values, sub-blocks, super-blocks]`` or
``[values, blocks]``: sums over values then add long contiguous rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_REFITS = 2  # of a block's scale, after its first guess
_ROUNDS = 3  # of the integer scales of a super-block, each followed by a refit of the shared ones

# Where the ends of a block's range are put, in steps between two levels: 0 has the end exactly on
# the last level, more clips it.
_SHIFTS_OF_ENDS = (-0.4, -0.1, 0.2, 0.5, 0.8)
_SHIFTS_OF_MAGNITUDE = tuple(0.15 * i for i in range(-6, 11))


class Levels(Protocol):
    """What a scale is multiplied with: numbers from ``low`` to ``high``, about ``step`` apart."""

    @property
    def low(self) -> int: ...

    @property
    def high(self) -> int: ...

    @property
    def step(self) -> float: ...

    def nearest_(self, x: Tensor) -> Tensor:
        """Replace each value by the level nearest to it; ``x`` (contiguous) is returned."""
        ...


@dataclass(frozen=True)
class IntegerLevels:
    """The integers from ``low`` to ``high``."""

    low: int
    high: int
    step: float = 1.0

    def nearest_(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(self.low, self.high)


class TableLevels:
    """The integers of a table, which rises."""

    def __init__(self, values: tuple[int, ...]):
        self.low, self.high = values[0], values[-1]
        self.step = (self.high - self.low) / len(values)
        # The middles of two integers are multiples of 1/2, so all of an interval between two such
        # multiples has the same level.
        levels = torch.tensor(values, dtype=torch.float32)
        starts = torch.arange(2 * self.low, 2 * self.high + 1) / 2
        self._of_interval = levels[torch.bucketize(starts + 0.25, (levels[1:] + levels[:-1]) / 2)]

    def nearest_(self, x: Tensor) -> Tensor:
        interval = x.mul_(2).floor_().sub_(2 * self.low).clamp_(0, len(self._of_interval) - 1)
        return x.copy_(self._of_interval[interval.int()])


class SymmetricFit(NamedTuple):
    """``x = d * s * L`` of super-blocks; integers are float32 here."""

    d: Tensor  # [n], float16 values
    s: Tensor  # [sub-blocks, n]
    levels: Tensor  # [values, sub-blocks, n]


class AffineFit(NamedTuple):
    """``x = d * s * q - e * t`` of super-blocks; integers are float32 here."""

    d: Tensor  # [n], float16 values
    e: Tensor
    s: Tensor  # [sub-blocks, n]
    t: Tensor
    q: Tensor  # [values, sub-blocks, n]


def half(x: Tensor) -> Tensor:
    """Rounded to float16, in float32."""
    return x.half().float()


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """``x / y``, and 0 where that is not finite."""
    return (x / y).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def extreme(x: Tensor) -> Tensor:
    """The value of the largest magnitude of each block, the first of several: [V, ...] -> [...]"""
    return x.gather(0, x.abs().argmax(0, keepdim=True)).squeeze(0)


# ---- x = d * s * L ----


def fit_symmetric(x: Tensor, weights: Tensor, levels: Levels, scales: IntegerLevels) -> SymmetricFit:
    """``d`` and ``s`` that make the sum of ``weights * (x - d * s * L)^2`` small.

    ``x``, ``weights``: float32 [values, sub-blocks, n]. ``d`` may have either sign.
    """
    blocks = _SymmetricBlocks(x, weights, levels)
    a = fit_scale(x, weights, levels)
    _, norm = blocks.moments(a)
    d = half(fit_scale(a, norm, scales))
    s = scales.nearest_(quotient(a, d))
    error = blocks.error(d * s)
    for _ in range(_ROUNDS):
        for change in (-1, 1) if scales.low < scales.high else ():
            trial = (s + change).clamp_(scales.low, scales.high)
            trial_error = blocks.error(d * trial)
            s = torch.where(trial_error < error, trial, s)
            error = torch.minimum(trial_error, error)
        projection, norm = blocks.moments(d * s)
        refit = half(quotient((s * projection).sum(0), (s * s * norm).sum(0)))
        refit_error = blocks.error(refit * s)
        is_better = refit_error.sum(0) < error.sum(0)
        d = torch.where(is_better, refit, d)
        error = torch.where(is_better, refit_error, error)
    return SymmetricFit(d, s, blocks.round(d * s))


class _SymmetricBlocks:
    """What is asked of sub-blocks [values, ...] for trial scales [...]."""

    def __init__(self, x: Tensor, weights: Tensor, levels: Levels):
        self._x, self._weights, self._levels = x, weights, levels
        self._weighted = weights * x

    def round(self, a: Tensor) -> Tensor:
        """The levels nearest to ``x / a``."""
        return self._levels.nearest_(self._x * quotient(torch.ones(()), a))

    def error(self, a: Tensor) -> Tensor:
        """The weighted squared error: [...]"""
        return self.round(a).mul_(a).sub_(self._x).square_().mul_(self._weights).sum(0)

    def moments(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of ``weights * L * x`` and of ``weights * L^2``."""
        levels = self.round(a)
        projection = (levels * self._weighted).sum(0)
        return projection, levels.square_().mul_(self._weights).sum(0)


def fit_scale(x: Tensor, weights: Tensor, levels: Levels) -> Tensor:
    """The scale ``a`` of each block that makes the sum of ``weights * (x - a * L)^2`` small.

    ``x``, ``weights``: float32 [values, ...]. Returns float32 [...], of either sign.
    """
    blocks = _SymmetricBlocks(x, weights, levels)
    largest = extreme(x)
    best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
    for magnitude in _magnitudes(levels):
        projection, norm = blocks.moments(largest / magnitude)
        gain = quotient(projection.square(), norm)  # by how much the error is less than that of 0
        is_better = gain > best
        best = torch.where(is_better, gain, best)
        scale = torch.where(is_better, quotient(projection, norm), scale)
    return scale


def _magnitudes(levels: Levels) -> list[float]:
    """Levels, and places near levels, at which to put the value of the largest magnitude."""
    shifts = [shift * levels.step for shift in _SHIFTS_OF_MAGNITUDE]
    at_high = [levels.high - shift for shift in shifts if levels.high > shift]
    return at_high + [levels.low + shift for shift in shifts] if levels.low < 0 else at_high


# ---- x = d * s * q - e * t ----


def fit_affine(x: Tensor, weights: Tensor, top: int, scales: IntegerLevels) -> AffineFit:
    """``d, e, s, t`` that make the sum of ``weights * (x - d * s * q + e * t)^2`` small.

    ``x``, ``weights``: float32 [values, sub-blocks, n]; ``q`` goes from 0 to ``top``, ``s`` and
    ``t`` over ``scales``. ``d`` is positive or 0, and so is ``e`` if ``t`` can be 0.
    """
    blocks = _AffineBlocks(x, weights, top)
    a, b = fit_range(x, weights, top, below_zero=scales.low == 0)
    sums = blocks.moments(a, b)
    d = half(fit_scale(a, sums.qq, scales))
    e = half(fit_scale(b, sums.w.expand_as(b), scales))
    s, t = scales.nearest_(quotient(a, d)), scales.nearest_(quotient(b, e))
    error = blocks.error(d * s, e * t)
    for _ in range(_ROUNDS):
        if scales.low < scales.high:
            s, t, error = _improve_integers(blocks, scales, d, e, s, t, error)
        refit_d, refit_e = _refit_shared(blocks.moments(d * s, e * t), d, e, s, t)
        refit_error = blocks.error(refit_d * s, refit_e * t)
        is_better = refit_error.sum(0) < error.sum(0)
        d, e = torch.where(is_better, refit_d, d), torch.where(is_better, refit_e, e)
        error = torch.where(is_better, refit_error, error)
    return AffineFit(d, e, s, t, blocks.round(d * s, e * t))


class _Moments(NamedTuple):
    """Sums over the values of each sub-block, of the weights times what the names say."""

    w: Tensor
    x: Tensor
    q: Tensor
    qq: Tensor
    qx: Tensor


class _AffineBlocks:
    """What is asked of sub-blocks [values, ...] for trial scales and offsets, ``x = a q - b``."""

    def __init__(self, x: Tensor, weights: Tensor, top: int):
        self._x, self._weights, self._top = x, weights, top
        self._weighted = weights * x
        self._sum_w, self._sum_x = weights.sum(0), self._weighted.sum(0)

    def round(self, a: Tensor, b: Tensor) -> Tensor:
        inverse = quotient(torch.ones(()), a)
        return (self._x + b).mul_(inverse).round_().clamp_(0, self._top)

    def error(self, a: Tensor, b: Tensor) -> Tensor:
        error = self.round(a, b).mul_(a).sub_(b).sub_(self._x)
        return error.square_().mul_(self._weights).sum(0)

    def moments(self, a: Tensor, b: Tensor) -> _Moments:
        q = self.round(a, b)
        sum_qx = (q * self._weighted).sum(0)
        product = q * self._weights
        return _Moments(self._sum_w, self._sum_x, product.sum(0), product.mul_(q).sum(0), sum_qx)


def fit_range(x: Tensor, weights: Tensor, top: int, below_zero: bool) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` of each block that make the sum of ``weights * (x - a * q + b)^2`` small.

    ``x``, ``weights``: float32 [values, ...]; ``below_zero``: whether ``b`` must not be negative.
    """
    blocks = _AffineBlocks(x, weights, top)
    low, high = x.amin(0), x.amax(0)
    if below_zero:
        low = low.clamp_(max=0)
    step = (high - low).clamp_(min=0) / top
    best = torch.full_like(low, torch.inf)
    a, b = step, -low
    for at_low in _SHIFTS_OF_ENDS:
        for at_high in _SHIFTS_OF_ENDS:
            trial_a = step * ((top - at_low - at_high) / top)
            a, b, best = _try_range(blocks, trial_a, -low - at_low * step, below_zero, a, b, best)
    for _ in range(_REFITS):
        a, b, best = _try_range(blocks, a, b, below_zero, a, b, best)
    return a, b


def _try_range(
    blocks: _AffineBlocks,
    trial_a: Tensor,
    trial_b: Tensor,
    below_zero: bool,
    a: Tensor,
    b: Tensor,
    best: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round with a trial's scale and offset, fit those, and keep them where they are better."""
    sums = blocks.moments(trial_a, trial_b)
    trial_a, trial_b = _least_squares(sums, below_zero)
    # The error, less the sum of squares of x, which is the same in all trials.
    error = (
        trial_a * (trial_a * sums.qq - 2 * trial_b * sums.q - 2 * sums.qx)
        + trial_b * (trial_b * sums.w + 2 * sums.x)
    )
    is_better = error < best
    return (
        torch.where(is_better, trial_a, a),
        torch.where(is_better, trial_b, b),
        torch.where(is_better, error, best),
    )


def _least_squares(sums: _Moments, below_zero: bool) -> tuple[Tensor, Tensor]:
    determinant = sums.w * sums.qq - sums.q * sums.q
    a = quotient(sums.w * sums.qx - sums.q * sums.x, determinant).clamp_(min=0)
    b = quotient(a * sums.q - sums.x, sums.w)
    if not below_zero:
        return a, b
    through_zero = quotient(sums.qx, sums.qq).clamp_(min=0)
    return torch.where(b < 0, through_zero, a), b.clamp_(min=0)


def _improve_integers(
    blocks: _AffineBlocks,
    scales: IntegerLevels,
    d: Tensor,
    e: Tensor,
    s: Tensor,
    t: Tensor,
    error: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours of ``s``, each with the ``t`` that fits it, and then neighbours of that."""
    sums = blocks.moments(d * s, e * t)
    mean_q, mean_x = quotient(sums.q, sums.w), quotient(sums.x, sums.w)
    start = s
    for change in (0, -1, 1):
        trial_s = (start + change).clamp_(scales.low, scales.high)
        trial_t = scales.nearest_(quotient(d * trial_s * mean_q - mean_x, e))
        trial_error = blocks.error(d * trial_s, e * trial_t)
        is_better = trial_error < error
        s, t = torch.where(is_better, trial_s, s), torch.where(is_better, trial_t, t)
        error = torch.minimum(trial_error, error)
    for change in (-1, 1):
        trial_t = (t + change).clamp_(scales.low, scales.high)
        trial_error = blocks.error(d * s, e * trial_t)
        t = torch.where(trial_error < error, trial_t, t)
        error = torch.minimum(trial_error, error)
    return s, t, error


def _refit_shared(
    sums: _Moments, d: Tensor, e: Tensor, s: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """The least-squares ``d`` and ``e`` of super-blocks; where there is none, those given."""
    dd, de, ee = (s * s * sums.qq).sum(0), (s * t * sums.q).sum(0), (t * t * sums.w).sum(0)
    dx, ex = (s * sums.qx).sum(0), (t * sums.x).sum(0)
    determinant = dd * ee - de * de
    fit_d = half(quotient(dx * ee - de * ex, determinant))
    fit_e = half(quotient(de * dx - dd * ex, determinant))
    is_fit = determinant > 0
    return torch.where(is_fit, fit_d, d), torch.where(is_fit, fit_e, e)
