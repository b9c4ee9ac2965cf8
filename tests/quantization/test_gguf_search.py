"""Searches find about what trying every scale finds, and the scales that blocks were made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.quantization.gguf_formats import IQ4_VALUES
from octavo.quantization.gguf_search import (
    FIXED,
    IntegerLevels,
    Levels,
    TableLevels,
    fit_affine,
    fit_symmetric,
)

SIX_BITS = IntegerLevels(0, 63)


def random_blocks(values: int, sub_blocks: int, count: int) -> tuple[Tensor, Tensor]:
    """Values and weights: [values, sub-blocks, count] each."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(values, sub_blocks, count, generator=random)
    return x, torch.rand(values, sub_blocks, count, generator=random) + 0.1


def test_nearest_level_of_a_table() -> None:
    levels = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    x = torch.arange(-140, 130, 0.125) + 1 / 32  # on either side of all middles
    expected = levels[(x[:, None] - levels).abs().argmin(1)]
    assert torch.equal(TableLevels(IQ4_VALUES).nearest_(x.clone()), expected)


@pytest.mark.parametrize(
    "levels",
    [IntegerLevels(-4, 3), IntegerLevels(-8, 7), TableLevels(IQ4_VALUES)],
)
def test_scale_against_every_scale(levels: Levels) -> None:
    x, weights = random_blocks(32, 1, 20)
    fit = fit_symmetric(x, weights, levels, FIXED)
    assert torch.equal(fit.d, fit.d.half().float()) and (fit.s == 1).all()
    found = (weights * (x - fit.d * fit.levels).square()).sum((0, 1))
    best = torch.full_like(found, torch.inf)
    for place in torch.linspace(0.6, 1.4, 500):
        for end in (levels.low, levels.high):
            a = x.abs().amax((0, 1)) / (end * place)
            rounded = levels.nearest_(x / a) * a
            best = torch.minimum(best, (weights * (x - rounded).square()).sum((0, 1)))
    assert (found <= 1.15 * best).all()
    assert found.sum() <= 1.03 * best.sum()


def test_range_against_every_range() -> None:
    x, weights = random_blocks(32, 1, 20)
    x, levels = x + 3, IntegerLevels(0, 15)
    fit = fit_affine(x, weights, levels, FIXED)
    found = (weights * (x - fit.d * fit.q + fit.e).square()).sum((0, 1))
    low, high = x.amin((0, 1)), x.amax((0, 1))
    best = torch.full_like(found, torch.inf)
    for from_low in torch.linspace(-0.1, 0.1, 40):
        for from_high in torch.linspace(-0.1, 0.1, 40):
            start = low + from_low * (high - low)
            a = (high + from_high * (high - low) - start) / 15
            rounded = levels.nearest_((x - start) / a) * a + start
            best = torch.minimum(best, (weights * (x - rounded).square()).sum((0, 1)))
    assert found.sum() <= 1.05 * best.sum()


def test_offsets_of_a_free_range_may_be_of_either_sign() -> None:
    x, weights = random_blocks(32, 1, 8)
    for shift in (100, -100):  # float32 sums of these squares would not tell one range from another
        fit = fit_affine(x + shift, weights, IntegerLevels(0, 15), FIXED)
        error = (weights * (x + shift - fit.d * fit.q + fit.e).square()).sum()
        assert (fit.e * shift < 0).all()
        assert error < 0.01 * (weights * x.square()).sum()


@pytest.mark.parametrize(
    ("levels", "scales"),
    [
        (IntegerLevels(-4, 3), IntegerLevels(-32, 31)),
        (IntegerLevels(-32, 31), IntegerLevels(-128, 127)),
        (TableLevels(IQ4_VALUES), IntegerLevels(-32, 31)),
    ],
)
def test_symmetric_super_blocks_are_found_again(levels: Levels, scales: IntegerLevels) -> None:
    x, weights = random_blocks(16, 16, 30)
    made = fit_symmetric(x, weights, levels, scales)
    assert torch.equal(made.s, made.s.round())
    assert scales.low <= made.s.min() and made.s.max() <= scales.high
    values = made.d * made.s * made.levels
    again = fit_symmetric(values, weights, levels, scales)
    error = (again.d * again.s * again.levels - values).square().sum()
    assert error <= 0.02 * (values - x).square().sum()


@pytest.mark.parametrize("top", [3, 15, 31])
def test_affine_super_blocks_are_found_again(top: int) -> None:
    x, weights = random_blocks(32, 8, 30)
    levels = IntegerLevels(0, top)
    made = fit_affine(x, weights, levels, SIX_BITS)
    for integers, largest in ((made.s, 63), (made.t, 63), (made.q, top)):
        assert torch.equal(integers, integers.round().clamp(0, largest))
    assert (made.d >= 0).all() and (made.e >= 0).all()
    values = made.d * made.s * made.q - made.e * made.t
    again = fit_affine(values, weights, levels, SIX_BITS)
    error = (again.d * again.s * again.q - again.e * again.t - values).square().sum()
    assert error <= 0.04 * (values - x).square().sum()


def test_integer_scales_against_every_one() -> None:
    """For the shared scale that was found no other integers are much better."""
    x, weights = random_blocks(16, 16, 30)
    levels, scales = IntegerLevels(-4, 3), IntegerLevels(-32, 31)
    fit = fit_symmetric(x, weights, levels, scales)
    found = (weights * (x - fit.d * fit.s * fit.levels).square()).sum(0)
    best = (weights * x.square()).sum(0)  # of a scale of 0
    for s in (*range(-32, 0), *range(1, 32)):
        values = levels.nearest_(x / (fit.d * s)) * (fit.d * s)
        best = torch.minimum(best, (weights * (x - values).square()).sum(0))
    assert found.sum() <= 1.001 * best.sum()


@pytest.mark.parametrize(("top", "tolerance"), [(3, 0.005), (15, 0.006), (31, 0.015)])
def test_integer_scales_and_offsets_against_others(top: int, tolerance: float) -> None:
    x, weights = random_blocks(32, 8, 30)
    levels = IntegerLevels(0, top)
    fit = fit_affine(x, weights, levels, SIX_BITS)
    found = (weights * (x - fit.d * fit.s * fit.q + fit.e * fit.t).square()).sum(0)
    best = found
    for change_of_s in range(-4, 5):
        for change_of_t in range(-6, 7):
            a = fit.d * (fit.s + change_of_s).clamp(1, 63)
            b = fit.e * (fit.t + change_of_t).clamp(0, 63)
            values = levels.nearest_((x + b) / a) * a - b
            best = torch.minimum(best, (weights * (x - values).square()).sum(0))
    assert found.sum() <= (1 + tolerance) * best.sum()


def test_sub_blocks_of_very_different_size() -> None:
    """The shared scale follows the large ones, and small ones are not lost."""
    x, weights = random_blocks(32, 8, 16)
    x = x * torch.logspace(0, 1, 8)[:, None]
    fit = fit_affine(x, weights, IntegerLevels(0, 15), SIX_BITS)
    error = (weights * (fit.d * fit.s * fit.q - fit.e * fit.t - x).square()).sum((0, 2))
    assert (error < 0.02 * (weights * x.square()).sum((0, 2))).all()
