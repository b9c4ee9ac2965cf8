"""GPTQ: what must hold of its codes, and what it gains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.quantize import gptq as module
from octavo.quantize.gptq import inverse_factor, output_error, quantize_gptq
from octavo.quantize.grid import Scheme, quantize_to_nearest

SCHEMES = [
    Scheme(4, 16),
    Scheme(3, 8, symmetric=False),
    Scheme(4, 1),
    Scheme(2, "channel"),
    Scheme(4, "tensor", symmetric=False),
    Scheme(4, 32, symmetric=False, float_minimum=True),
]
ORDERS = ["activation", "natural"]


def random_linear(rows=24, columns=64, tokens=256, seed=0):
    """A weight, and the Hessian of inputs that are correlated and of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator)
    sizes = torch.rand(columns, generator=generator) * 3 + 0.1
    inputs = torch.randn(tokens, columns, generator=generator) @ mixing * sizes
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    return weight, 2 / tokens * inputs.t() @ inputs


def errors(weight, hessian, scheme, **options):
    """Of GPTQ, and of rounding to nearest on the grids that GPTQ begins with; per row."""
    importance = hessian.diagonal() + module._DAMPING * hessian.diagonal().mean()
    nearest = quantize_to_nearest(weight, scheme, search=True, importance=importance)
    found = quantize_gptq(weight, hessian, scheme, **options)
    return output_error(weight, found, hessian), output_error(weight, nearest, hessian)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([4, 40, 400]),
    scheme=st.sampled_from(SCHEMES),
    order=st.sampled_from(ORDERS),
)
def test_no_row_is_worse_than_rounded_to_nearest(seed, tokens, scheme, order):
    weight, hessian = random_linear(8, 32, tokens, seed)
    ours, nearest = errors(weight, hessian, scheme, order=order)
    assert (ours <= nearest * (1 + 1e-5) + 1e-9).all()


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.group_size != 1], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_it_gains_by_correlations(scheme, order):
    ours, nearest = errors(*random_linear(), scheme, order=order)
    assert ours.sum() < 0.75 * nearest.sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("search", [False, True])
def test_without_correlations_it_is_rounding_to_nearest(scheme, order, search):
    weight, _ = random_linear()
    found = quantize_gptq(weight, torch.eye(64), scheme, order=order, search=search)
    importance = torch.ones(64) if search else None
    nearest = quantize_to_nearest(weight, scheme, search=search, importance=importance)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.equal(found.scales, nearest.scales) and torch.equal(found.zeros, nearest.zeros)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_codes_are_in_range_and_scales_are_what_a_file_can_hold(scheme, order):
    found = quantize_gptq(*random_linear(), scheme, order=order)
    assert int(found.codes.max()) <= scheme.max_code
    assert torch.equal(found.scales.half().float(), found.scales) and (found.scales > 0).all()
    assert torch.equal(found.zeros.half().float(), found.zeros)
    if scheme.group_size == "tensor":
        assert len(found.scales.unique()) == 1


def plain_gptq(weight, hessian, scheme):
    """The definition: after each column the rest is what minimizes the error that remains, by the
    inverse of the Hessian of the columns that are left."""
    grid_of = quantize_to_nearest(weight, scheme)
    left, result = weight.double().clone(), torch.empty_like(weight)
    damped = hessian.double() + module._DAMPING * hessian.diagonal().mean() * torch.eye(
        len(hessian)
    )
    order = hessian.diagonal().argsort(descending=True).tolist()
    width = weight.shape[1] // grid_of.scales.shape[1]
    while order:
        column, inverse = order[0], torch.linalg.inv(damped[order][:, order])
        scales, zeros = (each[:, column // width] for each in (grid_of.scales, grid_of.zeros))
        codes = (left[:, column] / scales + zeros).round().clamp(0, scheme.max_code)
        result[:, column] = codes
        error = (left[:, column] - (codes - zeros) * scales) / inverse[0, 0]
        left[:, order] -= error[:, None] * inverse[0]
        order = order[1:]
    return result


def test_it_is_what_the_definition_says(monkeypatch):
    """Column by column, in blocks that do not divide their number; but for ties in rounding."""
    monkeypatch.setattr(module._StaticGrids, "block", 12)
    weight, hessian = random_linear(16, 32)
    found = quantize_gptq(weight, hessian, Scheme(3, 16), search=False)
    assert (found.codes == plain_gptq(weight, hessian, Scheme(3, 16))).float().mean() > 0.99


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_change_nothing_but_speed(monkeypatch, block, order):
    weight, hessian = random_linear()
    whole = quantize_gptq(weight, hessian, Scheme(4, 16), order=order)
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module._StaticGrids, "block", block)
    pieces = quantize_gptq(weight, hessian, Scheme(4, 16), order=order)
    assert (whole.codes == pieces.codes).float().mean() > 0.99


def test_scales_in_natural_order_are_of_columns_as_they_have_become():
    """The first group is that of the weights; the others have taken on errors of those before."""
    weight, hessian = random_linear()
    grids = quantize_to_nearest(weight, Scheme(4, 16)).scales
    scales = quantize_gptq(weight, hessian, Scheme(4, 16), order="natural", search=False).scales
    assert torch.equal(scales[:, 0], grids[:, 0]) and not torch.equal(scales[:, 1:], grids[:, 1:])


def test_channels_without_inputs_are_rounded_to_nearest():
    weight, hessian = random_linear()
    dead = torch.tensor([0, 17, 63])
    hessian[dead], hessian[:, dead] = 0, 0
    found = quantize_gptq(weight, hessian, Scheme(4, 16), search=False)
    nearest = quantize_to_nearest(weight, Scheme(4, 16))
    assert torch.equal(found.codes[:, dead], nearest.codes[:, dead])
    ours, theirs = errors(weight, hessian, Scheme(4, 16))
    assert ours.sum() < theirs.sum()


def test_a_linear_without_any_inputs_is_rounded_to_nearest():
    weight, _ = random_linear()
    found = quantize_gptq(weight, torch.zeros(64, 64), Scheme(4, 16), search=False)
    assert torch.equal(found.codes, quantize_to_nearest(weight, Scheme(4, 16)).codes)


def test_the_factor_is_that_of_the_damped_inverse():
    _, hessian = random_linear()
    factor = inverse_factor(hessian)
    damped = hessian + module._DAMPING * hessian.diagonal().mean() * torch.eye(64)
    assert torch.equal(factor, factor.triu()) and (factor.diagonal() > 0).all()
    torch.testing.assert_close(factor.t() @ factor @ damped, torch.eye(64), rtol=0, atol=1e-3)


def test_damping_is_raised_until_there_is_a_factor():
    """Rounding can leave a Hessian that is not positive semidefinite by more than is added."""
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1.5
    factor = inverse_factor(hessian)
    assert torch.isfinite(factor).all() and (factor.diagonal() > 0).all()


def test_statistics_that_are_not_finite_are_refused():
    weight, hessian = random_linear()
    hessian[3, 3] = torch.inf
    with pytest.raises(ConfigError, match="inputs of a linear are not finite"):
        quantize_gptq(weight, hessian, Scheme(4, 16))


def test_groups_that_do_not_fill_a_row_are_refused():
    with pytest.raises(ConfigError, match="groups of 48"):
        quantize_gptq(*random_linear(), Scheme(4, 48))


def test_the_number_of_threads_is_what_it_was():
    before = torch.get_num_threads()
    quantize_gptq(*random_linear(), Scheme(4, 16))
    assert torch.get_num_threads() == before
