"""Searches for the scales of quantized blocks with the least weighted squared error.

A value is approximated by a scale times a level, ``x = a * L``, or with an offset,
``x = a * q - b``. The best levels follow from the scale, and the best scale from the levels (a
least-squares fit). So a search tries scales, rounds, refits, and keeps the best, as k-means does. A
super-block shares one or two float16 numbers among its sub-blocks, whose own scales are small
integers: these are searched in the same way, with all levels rounded again at each trial.

Tensors here are float32, also integers, and have the values of a sub-block first:
``[values, sub-blocks, super-blocks]``, so that sums over values add long contiguous rows. Sums have
one order, and all else is rounded as IEEE 754 says: a search ends in the same bits on all machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_REFITS = 2  # of the best range of a block
_ROUNDS = 2  # of the integer scales of a super-block, each followed by a refit of the shared ones

# Where the ends of a block's values are put, in steps between levels beyond the last level: more
# than 0 clips them, less leaves levels unused. The error jumps as the scale changes, so some of
# many similar scales is much better than the others.
_SHIFTS_OF_ENDS = (-1.0, -0.5, 0.0, 0.5, 1.0)
_SHIFTS_OF_EXTREME = tuple(0.15 * i for i in range(-10, 11))


class Levels(Protocol):
    """Numbers that a scale is multiplied with: from ``low`` to ``high``, about ``step`` apart."""

    @property
    def low(self) -> int: ...

    @property
    def high(self) -> int: ...

    @property
    def step(self) -> float: ...

    def nearest_(self, x: Tensor) -> Tensor:
        """Replace each value of ``x``, contiguous and returned, by the level nearest to it."""
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
    """The integers of an ascending table."""

    def __init__(self, values: tuple[int, ...]):
        self.low, self.high = values[0], values[-1]
        self.step = (self.high - self.low) / len(values)
        # Halfway between two integers is a multiple of 1/2, so that all numbers between two such
        # multiples have the same nearest level.
        levels = torch.tensor(values, dtype=torch.float32)
        starts = torch.arange(2 * self.low, 2 * self.high + 1) / 2
        self._of_interval = levels[torch.bucketize(starts + 0.25, (levels[1:] + levels[:-1]) / 2)]

    def nearest_(self, x: Tensor) -> Tensor:
        interval = x.mul_(2).floor_().sub_(2 * self.low).clamp_(0, len(self._of_interval) - 1)
        table, index = self._of_interval.to(x.device), interval.int().view(-1)
        return torch.index_select(table, 0, index, out=x.view(-1)).view(x.shape)


FIXED = IntegerLevels(1, 1)
"""Stands for the scales of a format without integer scales: its blocks have one sub-block."""


class SymmetricFit(NamedTuple):
    """Fit of ``x = d * s * L``."""

    d: Tensor  # [n], float16 values, of either sign
    s: Tensor  # [sub-blocks, n]
    levels: Tensor  # [values, sub-blocks, n]


class AffineFit(NamedTuple):
    """Fit of ``x = d * s * q - e * t``."""

    d: Tensor  # [n], float16 values, not negative
    e: Tensor  # [n], float16 values, not negative if there are integer scales
    s: Tensor  # [sub-blocks, n]
    t: Tensor  # [sub-blocks, n]
    q: Tensor  # [values, sub-blocks, n]


def fit_symmetric(
    x: Tensor, weights: Tensor, levels: Levels, scales: IntegerLevels
) -> SymmetricFit:
    """Minimize the sum of ``weights * (x - d * s * L)^2`` of each super-block.

    ``x``, ``weights``: [values, sub-blocks, n]; ``s`` is one of ``scales``.
    """
    blocks = _SymmetricBlocks(x, weights, levels)
    a = _fit_scale(x, weights, levels)
    d = _half(_fit_scale(a, blocks.moments(a).norm, scales))
    s = scales.nearest_(quotient(a, d))
    error = blocks.error(d * s)
    for _ in range(_ROUNDS):
        for trial in _neighbours(s, scales, levels):
            s, error = _better((s, error), (trial, blocks.error(d * trial)))
        sums = blocks.moments(d * s)
        refit = _half(quotient(total(s * sums.projection), total(s * s * sums.norm)))
        d, _ = _better((d, total(error)), (refit, total(blocks.error(refit * s))))
        error = blocks.error(d * s)
    return SymmetricFit(d, s, blocks.round(d * s))


def fit_affine(
    x: Tensor, weights: Tensor, levels: IntegerLevels, scales: IntegerLevels
) -> AffineFit:
    """Minimize the sum of ``weights * (x - d * s * q + e * t)^2`` of each super-block.

    ``x``, ``weights``: [values, sub-blocks, n]; ``q`` is one of ``levels``, which start at 0, and
    ``s`` and ``t`` are from ``scales``. Unless these are FIXED an offset cannot be negative.
    """
    blocks = _AffineBlocks(x, weights, levels)
    is_free = scales == FIXED
    a, b = _fit_range(x, weights, levels, is_free)
    d = _half(_fit_scale(a, blocks.moments(a, b).qq, scales))
    e = _half(_fit_scale(b, total(weights), scales))
    s, t = scales.nearest_(quotient(a, d)), scales.nearest_(quotient(b, e))
    for _ in range(_ROUNDS):
        if not is_free:
            s, t = _improve_integers(blocks, scales, d, e, s, t)
        error = total(blocks.error(d * s, e * t))
        refit_d, refit_e = _refit_shared(blocks.moments(d * s, e * t), s, t, is_free)
        refit_error = total(blocks.error(refit_d * s, refit_e * t))
        d, e, _ = _better((d, e, error), (refit_d, refit_e, refit_error))
    return AffineFit(d, e, s, t, blocks.round(d * s, e * t))


def quotient(x: Tensor | float, y: Tensor) -> Tensor:
    """``x / y``, and 0 where that is not finite."""
    return (x / y).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def total(x: Tensor) -> Tensor:
    """Sum over the first dimension, whose size is a power of two.

    Unlike ``torch.sum``, its order does not depend on the other sizes, on threads or on vector
    units. It makes a search take a third more time.
    """
    while len(x) > 1:
        middle = len(x) // 2
        x = x[:middle] + x[middle:]
    return x[0]


def extreme(x: Tensor) -> Tensor:
    """The value of the largest magnitude of each block, the first of several: [V, ...] -> [...]"""
    return x.gather(0, x.abs().argmax(0, keepdim=True)).squeeze(0)


def _half(x: Tensor) -> Tensor:
    """Round to float16."""
    return x.half().float()


def _neighbours(s: Tensor, scales: IntegerLevels, levels: Levels) -> list[Tensor]:
    """Integers near ``s`` to try, more of them for formats with more levels."""
    if scales == FIXED:
        return []
    reach = max(1, int((levels.high - levels.low) / levels.step) // 8)
    changes = [*range(-reach, 0), *range(1, reach + 1)]
    return [(s + change).clamp_(scales.low, scales.high) for change in changes]


def _better(best: tuple[Tensor, ...], trial: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The better of two choices for each block; the last tensor of a choice is its error."""
    is_better = trial[-1] < best[-1]
    return tuple(torch.where(is_better, new, old) for old, new in zip(best, trial, strict=True))


# ---- x = a * L ----


class _SymmetricMoments(NamedTuple):
    projection: Tensor  # sum of weights * L * x
    norm: Tensor  # sum of weights * L^2


class _SymmetricBlocks:
    """Rounding, errors and moments of blocks [values, ...] for trial scales [...]."""

    def __init__(self, x: Tensor, weights: Tensor, levels: Levels):
        self._x, self._weights, self._levels = x, weights, levels
        self._weighted = weights * x

    def round(self, a: Tensor) -> Tensor:
        return self._levels.nearest_(self._x * quotient(1.0, a))

    def error(self, a: Tensor) -> Tensor:
        difference = self.round(a).mul_(a).sub_(self._x)
        return total(difference.square_().mul_(self._weights))

    def moments(self, a: Tensor) -> _SymmetricMoments:
        levels = self.round(a)
        projection = total(levels * self._weighted)
        return _SymmetricMoments(projection, total(levels.square_().mul_(self._weights)))


def _fit_scale(x: Tensor, weights: Tensor, levels: Levels) -> Tensor:
    """``a`` of each block that minimizes the sum of ``weights * (x - a * L)^2``.

    ``x``, ``weights``: [values, ...]. Returns [...], of either sign.
    """
    blocks = _SymmetricBlocks(x, weights, levels)
    largest = extreme(x)
    a, error = torch.zeros_like(largest), torch.zeros_like(largest)
    for place in _places_of_extreme(levels):
        sums = blocks.moments(largest / place)
        trial = quotient(sums.projection, sums.norm)
        # Without the sum of squares of x, which is the same for all.
        a, error = _better((a, error), (trial, -trial * sums.projection))
    return a


def _places_of_extreme(levels: Levels) -> list[float]:
    """Numbers around the first and the last level to which the extreme value may be scaled."""
    shifts = [shift * levels.step for shift in _SHIFTS_OF_EXTREME]
    places = [levels.high + shift for shift in shifts if levels.high + shift > 0]
    return places + [levels.low - shift for shift in shifts] if levels.low < 0 else places


# ---- x = a * q - b ----


class _AffineMoments(NamedTuple):
    """Weighted sums over the values of each block; the names say of which product."""

    w: Tensor
    x: Tensor
    q: Tensor
    qq: Tensor
    qx: Tensor


class _AffineBlocks:
    """Rounding, errors and moments of blocks [values, ...] for trial scales and offsets [...]."""

    def __init__(self, x: Tensor, weights: Tensor, levels: IntegerLevels):
        self._x, self._weights, self.levels = x, weights, levels
        self._weighted = weights * x
        self._sum_w, self._sum_x = total(weights), total(self._weighted)

    def round(self, a: Tensor, b: Tensor) -> Tensor:
        return self.levels.nearest_((self._x + b).mul_(quotient(1.0, a)))

    def error(self, a: Tensor, b: Tensor) -> Tensor:
        difference = self.round(a, b).mul_(a).sub_(b).sub_(self._x)
        return total(difference.square_().mul_(self._weights))

    def moments(self, a: Tensor, b: Tensor) -> _AffineMoments:
        q = self.round(a, b)
        sum_qx = total(q * self._weighted)
        weighted_q = q * self._weights
        sum_q, sum_qq = total(weighted_q), total(weighted_q.mul_(q))
        return _AffineMoments(self._sum_w, self._sum_x, sum_q, sum_qq, sum_qx)


def _fit_range(
    x: Tensor, weights: Tensor, levels: IntegerLevels, is_free: bool
) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` of each block that minimize the weighted error; ``b >= 0`` unless free."""
    low = x.amin(0) if is_free else x.amin(0).clamp_(max=0)
    least_b = torch.full_like(low, -torch.inf) if is_free else low
    blocks = _AffineBlocks(x - low, weights, levels)  # sums are precise if values are near 0
    step = (x.amax(0) - low).clamp_(min=0) / levels.high
    a, b, error = step, torch.zeros_like(low), torch.full_like(low, torch.inf)
    for at_low, at_high in product(_SHIFTS_OF_ENDS, repeat=2):
        trial_a = step * (1 - (at_low + at_high) / levels.high)
        trial = _refit_range(blocks, trial_a, -at_low * step, least_b)
        a, b, error = _better((a, b, error), trial)
    for _ in range(_REFITS):
        a, b, error = _better((a, b, error), _refit_range(blocks, a, b, least_b))
    return a, b - low


def _refit_range(
    blocks: _AffineBlocks, a: Tensor, b: Tensor, least_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Least-squares ``a`` and ``b`` for the levels that the given ones lead to, and the error.

    The error lacks the sum of squares of x, which is the same for all.
    """
    sums = blocks.moments(a, b)
    determinant = sums.w * sums.qq - sums.q * sums.q
    b = torch.maximum(quotient(sums.q * sums.qx - sums.qq * sums.x, determinant), least_b)
    a = quotient(sums.qx + b * sums.q, sums.qq).clamp_(min=0)
    error = a * (a * sums.qq - 2 * b * sums.q - 2 * sums.qx) + b * (b * sums.w + 2 * sums.x)
    return a, b, error


def _improve_integers(
    blocks: _AffineBlocks, scales: IntegerLevels, d: Tensor, e: Tensor, s: Tensor, t: Tensor
) -> tuple[Tensor, ...]:
    """``s`` and its neighbours, each with its best ``t``, and then the neighbours of that ``t``."""
    error = blocks.error(d * s, e * t)
    sums = blocks.moments(d * s, e * t)
    mean_q, mean_x = quotient(sums.q, sums.w), quotient(sums.x, sums.w)
    for trial_s in (s, *_neighbours(s, scales, blocks.levels)):
        trial_t = scales.nearest_(quotient(d * trial_s * mean_q - mean_x, e))
        trial_error = blocks.error(d * trial_s, e * trial_t)
        s, t, error = _better((s, t, error), (trial_s, trial_t, trial_error))
    for trial_t in _neighbours(t, scales, blocks.levels):
        t, error = _better((t, error), (trial_t, blocks.error(d * s, e * trial_t)))
    return s, t


def _refit_shared(
    sums: _AffineMoments, s: Tensor, t: Tensor, is_free: bool
) -> tuple[Tensor, Tensor]:
    """Least-squares ``d`` and ``e`` of super-blocks, for given levels and integers."""
    dd, de, ee = total(s * s * sums.qq), total(s * t * sums.q), total(t * t * sums.w)
    dx, ex = total(s * sums.qx), total(t * sums.x)
    determinant = dd * ee - de * de
    d = quotient(dx * ee - de * ex, determinant).clamp_(min=0)
    e = quotient(de * dx - dd * ex, determinant)
    return _half(d), _half(e if is_free else e.clamp_(min=0))
