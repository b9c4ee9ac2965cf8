"""What is told of quantized rows, held against the definitions of it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import octavo.quantization
import octavo.quantize
from octavo.base.errors import ConfigError
from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.named_schemes import SCHEMES, named_scheme
from octavo.quantize.scheme import Scheme
from octavo.quantize.scheme_comparison import bits_against_error, explore, rows_of
from octavo.quantize.writers.bitsandbytes import NF4Writer
from octavo.quantize.writers.compressed_tensors import (
    CompressedTensorsWriter,
    FP8Writer,
)

ROWS = np.random.default_rng(3).normal(size=(64, 512)).astype(np.float32) * 0.1


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_scales_make_the_values(name):
    coded = explore(ROWS, name).coded
    scales, zeros, offsets = (
        each.repeat(coded.width, axis=1) for each in (coded.scales, coded.zeros, coded.offsets)
    )
    values = scales * (coded.levels - zeros) + offsets
    np.testing.assert_allclose(values, coded.values, rtol=1e-6, atol=1e-7)
    assert np.issubdtype(coded.codes.dtype, np.integer)
    assert np.unique(coded.codes).size <= 256


@pytest.mark.parametrize("search", [False, True])
def test_integers_are_those_of_the_methods(search):
    matrix = quantize_to_nearest(torch.from_numpy(ROWS), Scheme(3, 32, False), search=search)
    explored = explore(ROWS, "int3-g32-asym", search=search)
    assert np.array_equal(explored.coded.codes, matrix.codes.numpy())
    assert np.array_equal(explored.coded.values, matrix.dequantize().numpy())


def test_errors():
    explored = explore(ROWS, "int4-g64")
    errors = explored.coded.values.astype(np.float64) - ROWS
    assert explored.mean_square_error == pytest.approx(np.mean(errors**2), rel=1e-9)
    snr = 10 * np.log10(np.mean(ROWS.astype(np.float64) ** 2) / np.mean(errors**2))
    assert explored.snr_db == pytest.approx(snr, abs=1e-6)
    assert explored.errors.counts.sum() == explored.relative_errors.counts.sum() == ROWS.size
    edges, counts = explored.errors.edges, explored.errors.counts
    assert edges[-1] == -edges[0] == np.abs(errors).max()
    within = (errors >= edges[10]) & (errors < edges[11])
    assert counts[10] == within.sum()
    relative = np.abs(errors) / np.abs(ROWS)
    assert explored.relative_errors.counts[-1] == (relative >= 0.98).sum()
    assert explored.relative_errors.edges[[0, -1]].tolist() == [0, 1]


@pytest.mark.parametrize("last", [0, 15])
def test_without_errors(last):
    """Zeros, and values that are on the grid; of a zero the relative error is not defined."""
    rows = np.tile(np.linspace(0, last, 16, dtype=np.float32), (4, 4))
    explored = explore(rows, "int4-g64-asym", search=False)
    assert (explored.mean_square_error, explored.snr_db) == (0, math.inf)
    assert explored.as_json()["snr_db"] is None
    assert explored.errors.counts.sum() == 256
    assert explored.relative_errors.counts[0] == explored.relative_errors.counts.sum()
    assert explored.relative_errors.counts.sum() == np.count_nonzero(rows)


def of_file(parts, rows) -> float:
    return sum(part.data.nbytes for part in parts.values()) * 8 / rows.size


def test_bits_are_those_of_files():
    """But for what a tensor has once."""
    rows = np.tile(ROWS, (32, 2))
    for name, scheme, writer in (
        ("int4-g64", Scheme(4, 64), CompressedTensorsWriter()),
        ("int3-g32-asym", Scheme(3, 32, False), CompressedTensorsWriter()),
        ("int8-channel", Scheme(8, "channel"), CompressedTensorsWriter()),
        ("fp8", Scheme(8, "channel", table="e4m3"), FP8Writer()),
        ("nf4", Scheme(4, 64, table="nf4"), NF4Writer()),
    ):
        coded = quantize_to_nearest(torch.from_numpy(rows), scheme).coded(name)
        bits = named_scheme(name).bits_per_weight(rows.shape[1])
        assert bits == pytest.approx(of_file(writer.parts(coded, scheme), rows), abs=0.01)
    assert named_scheme("q4_k").bits_per_weight(512) == row_bytes(GGMLType.Q4_K, 512) * 8 / 512


def test_a_curve():
    points = bits_against_error(ROWS, ["Q8_0", "int2-g64", "int4-g64", "int3-g64"])
    assert [point.scheme for point in points] == ["int2-g64", "int3-g64", "int4-g64", "Q8_0"]
    lost = [point.mean_square_error for point in points]
    assert lost == sorted(lost, reverse=True)
    assert json.loads(json.dumps(points[0].as_json()))["bits_per_weight"] == 2.25


def test_a_curve_of_all_that_fit():
    names = {point.scheme for point in bits_against_error(ROWS[:4, :64])}
    assert "int4-g64" in names and "Q4_0" in names and "nf4" in names
    assert not names & {"Q4_K", "IQ4_XS"}  # blocks of 256
    assert {point.scheme for point in bits_against_error(ROWS[:4, :50])} == {
        *(f"int{bits}-channel" for bits in (2, 3, 4, 5, 6, 8)),
        "fp8",
    }


@pytest.mark.parametrize("name", ["int4-g64", "int4-channel", "Q4_K", "nf4"])
def test_a_corner_is_cut_of_all_and_is_json(name):
    explored = explore(ROWS, name, corner=(3, 70))
    corner = json.loads(json.dumps(explored.as_json(), allow_nan=False))["corner"]
    assert np.array(corner["codes"]).shape == np.array(corner["values"]).shape == (3, 70)
    assert np.array_equal(corner["codes"], explored.coded.codes[:3, :70])
    assert len(corner["scales"][0]) == -(-70 // corner["width"])
    assert np.array_equal(explored.corner_weights, ROWS[:3, :70])


@pytest.mark.parametrize(
    "rows, name, what",
    [
        (ROWS, "int9-g64", "no scheme 'int9-g64': give int2 to int8.*Q4_0"),
        (ROWS, "int4-g0", "no scheme"),
        (ROWS, "F16", "no scheme"),
        (ROWS, "Q8_1", "no scheme"),
        (ROWS, "int4-g48", "groups of 48"),
        (ROWS[:, :100], "Q4_0", "blocks of 32"),
        (ROWS * 1e8, "Q4_0", "65504"),
        (ROWS.astype(np.float64), "nf4", "float32"),
        (ROWS[0], "nf4", "float32"),
        (ROWS[:0], "nf4", "float32"),
        (np.full((2, 64), np.nan, np.float32), "nf4", "not finite"),
    ],
)
def test_what_cannot_be_explored(rows, name, what):
    with pytest.raises(ConfigError, match=what):
        explore(rows, name)


def test_an_empty_corner():
    with pytest.raises(ConfigError, match="a row and a column"):
        explore(ROWS, "nf4", corner=(0, 64))


def test_rows_of_a_model(tiny_model):
    name = "model.layers.1.mlp.down_proj.weight"
    rows = rows_of(tiny_model, name, rows=5)
    assert rows.shape == (5, 80) and rows.dtype == np.float32
    with pytest.raises(ConfigError, match="no matrix 'down_proj'; it has .*down_proj.*and others"):
        rows_of(tiny_model, "down_proj")
    with pytest.raises(ConfigError, match="no matrix"):
        rows_of(tiny_model, "model.norm.weight")


@pytest.mark.parametrize("package", [octavo.quantization, octavo.quantize])
def test_the_names_of_the_package(package):
    for name in package.__all__:
        assert callable(getattr(package, name)), name
    assert set(dir(package)) >= set(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gptq_'"):
        package.gptq_  # noqa: B018


def test_old_names_of_the_package_warn():
    assert octavo.quantize.explore is explore
    with pytest.warns(DeprecationWarning, match=r"octavo\.quantize\.explore"):
        assert octavo.quantization.explore is explore
