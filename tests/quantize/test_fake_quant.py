"""Matrices in training: their gradients, and that they are what a file will hold."""

from __future__ import annotations

import pytest
import torch

from octavo.quantize.fake_quant import FakeQuantMatrix, ScaledMatrix
from octavo.quantize.grid import Scheme, quantize_to_nearest

SCHEMES = [
    Scheme(3, 16, symmetric=False),
    Scheme(2, 8),
    Scheme(2, "channel", symmetric=False),
    Scheme(3, "tensor", symmetric=False),
]
ROWS, COLUMNS = 6, 32


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def begun(scheme, weight=None, seed=1):
    """A matrix in training whose start is that of another weight: codes are not the nearest."""
    weight = random(ROWS, COLUMNS) if weight is None else weight
    start = quantize_to_nearest(weight + 0.3 * random(ROWS, COLUMNS, seed=seed), scheme)
    return FakeQuantMatrix(start, weight), start


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_begins_as_it_was_made(scheme):
    weight = random(ROWS, COLUMNS)
    matrix, start = begun(scheme, weight)
    nearest = quantize_to_nearest(weight, scheme)
    assert not torch.equal(start.codes, nearest.codes)
    same = matrix.quantized()
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(same, name), getattr(start, name)), name


def test_places_are_those_of_the_weight_where_it_has_the_code_already():
    weight = random(ROWS, COLUMNS)
    scheme = Scheme(4, 8, symmetric=False)
    start = quantize_to_nearest(weight, scheme)
    matrix = FakeQuantMatrix(start, weight)
    places = weight.view(ROWS, -1, 8) / start.scales[..., None] + start.zeros[..., None]
    off = (places - start.codes.view(places.shape)).abs()
    near = off < 0.4
    assert 0.5 < near.float().mean() < 1
    assert torch.equal(matrix.places[near], places[near])
    assert torch.allclose((matrix.places - places)[~near].abs(), off[~near] - 0.4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_is_what_a_file_holds_wherever_it_has_gone(scheme):
    matrix, start = begun(scheme)
    matrix.places += 2 * random(*matrix.places.shape, seed=2)
    matrix.factors *= (0.7 * random(*matrix.factors.shape, seed=3)).exp()
    held = matrix.quantized()
    assert torch.equal(held.dequantize(), matrix.weight())
    assert not torch.equal(held.codes, start.codes) and torch.equal(held.zeros, start.zeros)
    assert int(held.codes.max()) == scheme.max_code and int(held.codes.min()) == 0
    assert torch.equal(held.scales.half().float(), held.scales)
    assert not torch.equal(held.scales, start.scales) and (held.scales > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_that_are_not_trained_stay(scheme):
    other, start = begun(scheme)
    matrix = ScaledMatrix(start)
    assert list(matrix.trained) == ["factors"] and list(other.trained) == ["factors", "places"]
    for each in (matrix, other):
        each.factors *= (0.7 * random(*matrix.factors.shape, seed=3)).exp()
    assert torch.equal(matrix.weight(), other.weight())
    held = matrix.quantized()
    assert torch.equal(held.codes, start.codes) and not torch.equal(held.scales, start.scales)
    assert torch.equal(held.dequantize(), matrix.weight())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_gradient_by_factors_is_exact(scheme):
    """Held against differences of a square, in steps that change scales by more than float16 has
    places for."""
    matrix, _ = begun(scheme)
    direction = random(ROWS, COLUMNS, seed=4)

    def loss():
        return (matrix.weight() * direction).sum().square()

    matrix.factors.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(), matrix.factors)
    step = 0.25
    with torch.no_grad():
        for place in ((0, 0), (-1, -1)):
            kept, ends = float(matrix.factors[place]), []
            for sign in (1, -1):
                matrix.factors[place] = kept + sign * step
                ends.append(float(loss()))
            matrix.factors[place] = kept
            found = (ends[0] - ends[1]) / (2 * step)
            assert float(gradient[place]) == pytest.approx(found, rel=0.02, abs=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_gradient_by_places_goes_straight_through(scheme):
    """It is that of a weight that is not rounded: of the scale within the range, 0 beyond."""
    matrix, start = begun(scheme)
    matrix.places += 2 * random(*matrix.places.shape, seed=2)
    direction = random(ROWS, COLUMNS, seed=4)
    matrix.places.requires_grad_()
    (matrix.weight() * direction).sum().backward()
    scales = start.scales[: len(matrix.places), :, None]
    inside = (matrix.places.round() >= 0) & (matrix.places.round() <= scheme.max_code)
    assert 0 < inside.float().mean() < 1
    expected = torch.where(inside, direction.view(matrix.places.shape) * scales, 0.0)
    assert torch.allclose(matrix.places.grad, expected, rtol=1e-6)
