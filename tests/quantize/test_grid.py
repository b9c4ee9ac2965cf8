"""Schemes, scales and zeros, and rounding to nearest."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.quantize.grid import (
    QuantizedMatrix,
    Scheme,
    full_grid,
    grouped,
    quantize_to_nearest,
    search_grid,
)

SCHEMES = [
    Scheme(bits, group_size, symmetric, float_minimum)
    for bits in (2, 3, 4, 8)
    for group_size in (1, 16, "channel", "tensor")
    for symmetric, float_minimum in ((True, False), (False, False), (False, True))
]


def random_matrix(rows=12, columns=64, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.05 + shift


def is_float16(values):
    return torch.equal(values.half().float(), values)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("search", [False, True])
def test_codes_are_in_range_and_scales_are_what_a_file_can_hold(scheme, search):
    matrix = quantize_to_nearest(random_matrix(), scheme, search=search)
    assert matrix.codes.dtype == torch.uint8 and int(matrix.codes.max()) <= scheme.max_code
    assert (matrix.scales > 0).all() and is_float16(matrix.scales)
    if scheme.float_minimum:
        assert is_float16(matrix.zeros)
    else:
        assert torch.equal(matrix.zeros, matrix.zeros.round().clamp(0, scheme.max_code))
    if scheme.symmetric:
        assert (matrix.zeros == 2 ** (scheme.bits - 1)).all()
    if scheme.group_size == "tensor":
        assert len(matrix.scales.unique()) == len(matrix.zeros.unique()) == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_value_has_a_nearer_point_on_its_grid(scheme):
    """By trying all of them."""
    weight = random_matrix(rows=3, columns=32)
    matrix = quantize_to_nearest(weight, scheme)
    chosen = (matrix.dequantize() - weight).abs()
    for code in range(scheme.max_code + 1):
        codes = torch.full_like(matrix.codes, code)
        other = QuantizedMatrix(codes, matrix.scales, matrix.zeros, scheme).dequantize()
        assert (chosen <= (other - weight).abs() + 1e-7).all()


def test_symmetric_scales_are_those_of_compressed_tensors():
    """absmax / 7.5 at 4 bits: the largest value is code -8 or between 7 and 8, by its sign."""
    weight = torch.tensor([[-0.75, 0.5, 0.0, 0.1], [0.75, -0.5, 0.04, 0.0]])
    matrix = quantize_to_nearest(weight, Scheme(4, "channel"))
    assert torch.equal(matrix.scales, torch.full((2, 1), 0.1).half().float())
    assert (matrix.codes.int() - 8).tolist() == [[-8, 5, 0, 1], [7, -5, 0, 0]]


def test_zero_points_by_hand():
    weight = torch.tensor([[-0.5, 1.0, 0.0, 0.26], [2.0, 3.0, 1.0, 0.5]])
    matrix = quantize_to_nearest(weight, Scheme(2, "channel", symmetric=False))
    assert matrix.scales.tolist() == [[0.5], [1.0]]
    assert matrix.zeros.tolist() == [[1.0], [0.0]], "a range includes zero"
    assert matrix.codes.tolist() == [[0, 3, 1, 2], [2, 3, 1, 0]], "halves go to the even code"


def test_float_minimums_are_those_of_q4_1():
    """Against another implementation, whose codes are of scales before they are rounded."""
    weight = random_matrix(rows=8, columns=64, shift=0.1)
    matrix = quantize_to_nearest(weight, Scheme(4, 32, symmetric=False, float_minimum=True))
    blocks = torch.from_numpy(gguf.quants.Q4_1.quantize(weight.numpy())).view(8, 2, 20)
    header = blocks[..., :4].contiguous().view(torch.float16).float()
    assert torch.equal(matrix.scales, header[..., 0])
    assert torch.equal(matrix.zeros, header[..., 1])
    theirs = torch.from_numpy(gguf.quants.Q4_1.dequantize(blocks.view(8, 40).numpy()))
    assert (matrix.dequantize() - weight).norm() <= (theirs - weight).norm()


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1000),
    scheme=st.sampled_from(SCHEMES),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    is_weighted=st.booleans(),
)
def test_a_searched_grid_is_no_worse_than_the_full_one(seed, scheme, scale, shift, is_weighted):
    weight = (random_matrix(4, 32, seed) * 20 + shift) * scale
    importance = torch.rand(32, generator=torch.Generator().manual_seed(seed)) + 0.01

    def error(matrix):
        error = (matrix.dequantize() - weight).abs().double()
        return error.square().mul(importance).sum() if is_weighted else error.pow(2.4).sum()

    weights = importance if is_weighted else None
    found = quantize_to_nearest(weight, scheme, search=True, importance=weights)
    assert error(found) <= error(quantize_to_nearest(weight, scheme)) * (1 + 1e-5)


def test_the_search_spares_the_channels_that_matter():
    """An outlier in a channel that is never used does not cost the others their precision."""
    weight = random_matrix(rows=4, columns=16)
    weight[:, 3] = 1.0
    importance = torch.ones(16)
    importance[3] = 0.0
    scheme = Scheme(4, "channel")
    others = torch.arange(16) != 3

    def error(**options):
        matrix = quantize_to_nearest(weight, scheme, **options)
        return float((matrix.dequantize() - weight)[:, others].norm())

    assert error(search=True, importance=importance) < 0.6 * error()


def test_a_range_that_is_far_from_zero_is_narrowed_around_its_middle():
    """Then zero is not among the values, and to shrink them would move them away."""
    weight = random_matrix(rows=4, columns=16, shift=5.0)
    weight[:, 3] += 1.0
    importance = torch.ones(16)
    importance[3] = 0.01
    scheme = Scheme(3, "channel", symmetric=False, float_minimum=True)

    def error(**options):
        matrix = quantize_to_nearest(weight, scheme, **options)
        return float(((matrix.dequantize() - weight).square() * importance).sum())

    assert error(search=True, importance=importance) < 0.6 * error()


def test_importance_of_a_tensor_wide_group_is_that_of_its_columns():
    weight = random_matrix(rows=4, columns=16)
    weight[:, 3] = 1.0
    importance = torch.ones(16)
    importance[3] = 0.0
    found = quantize_to_nearest(weight, Scheme(4, "tensor"), search=True, importance=importance)
    assert float(found.scales[0, 0]) < 0.5 / 7.5


@pytest.mark.parametrize("value", [0.0, 1e-9, -1e-9])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_that_float16_cannot_hold_are_zero(scheme, value):
    matrix = quantize_to_nearest(torch.full((2, 16), value), scheme, search=True)
    assert torch.isfinite(matrix.scales).all() and (matrix.dequantize().abs() < 1e-7).all()


def test_a_search_in_pieces_is_the_search(monkeypatch):
    weight = random_matrix(rows=40, columns=64)
    values = grouped(weight, Scheme(4, 32))
    whole = search_grid(values, Scheme(4, 32))
    monkeypatch.setattr("octavo.quantize.grid._CHUNK_VALUES", 300)
    assert torch.equal(search_grid(values, Scheme(4, 32)).scales, whole.scales)


def test_groups_are_neighbours_in_a_row():
    weight = torch.arange(24.0).view(2, 12)
    assert torch.equal(grouped(weight, Scheme(4, 4))[1, 2], torch.arange(20.0, 24.0))
    assert full_grid(grouped(weight, Scheme(4, 4)), Scheme(4, 4)).scales.shape == (2, 3)


def test_groups_that_do_not_fill_a_row_are_refused_with_sizes_that_do():
    with pytest.raises(ConfigError, match="rows of 576 values .* groups of 128: .* 64 or 32 or 16"):
        quantize_to_nearest(torch.zeros(2, 576), Scheme(4, 128))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1, 32), "bits must be 2 to 8, not 1"),
        ((9, 32), "bits must be 2 to 8, not 9"),
        ((4, 0), "group_size must be"),
        ((4, "row"), "group_size must be"),
        ((4, 32, True, True), "a symmetric scheme has no minimum"),
    ],
)
def test_schemes_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Scheme(*arguments)


TABLES = [
    Scheme(8, "channel", table="e4m3"),
    Scheme(8, "tensor", table="e5m2"),
    Scheme(4, 64, table="nf4"),
]


@pytest.mark.parametrize("scheme", TABLES, ids=lambda scheme: scheme.table)
def test_tables(scheme):
    """Every code is that of the nearest entry, and the largest value of a group has the last."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    matrix = quantize_to_nearest(weight, scheme)
    coded = matrix.coded("x")
    assert torch.equal(torch.from_numpy(coded.dequantize()), matrix.dequantize())
    levels = torch.from_numpy(coded.levels)
    unit = weight / matrix.scales.repeat_interleave(scheme.group_width(128), dim=1)
    distances = (unit[..., None] - levels).abs().nan_to_num(torch.inf)
    error = (unit - levels[matrix.codes.long()]).abs()
    torch.testing.assert_close(error, distances.amin(dim=-1))
    assert levels[matrix.codes.long()].abs().max() == levels[levels.isfinite()].max()


@pytest.mark.parametrize("scheme", TABLES, ids=lambda scheme: scheme.table)
def test_scales_of_tables_are_searched(scheme):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    importance = torch.rand(128, generator=torch.Generator().manual_seed(1)) ** 4 + 0.01

    def error(matrix):
        return float(((weight - matrix.dequantize()).square() * importance).sum())

    searched = quantize_to_nearest(weight, scheme, search=True, importance=importance)
    assert error(searched) < 0.97 * error(quantize_to_nearest(weight, scheme))


def test_a_table_has_no_zeros():
    with pytest.raises(ConfigError, match="no zero points"):
        Scheme(4, 64, symmetric=False, table="nf4")
