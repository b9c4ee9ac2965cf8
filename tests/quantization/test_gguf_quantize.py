"""Bytes as ggml writes them where it does not search, and less error than it where it does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.quantization import gguf_quantize
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import QUANTIZABLE, quantize_to_blocks
from octavo.quantization.gguf_search import IntegerLevels, fit_affine

LIKE_GGML = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0)
BLOCKS = tuple(type for type in QUANTIZABLE if type not in FLOAT_TYPES)

# Squared error of what ggml's own code (ggml_quantize_chunk of ggml 0.25.3) makes of the rows
# of random_rows(), in 1/10,000 of their sum of squares: (normal, heavy-tailed, and both with
# importance, each square weighted with it).
ERROR_OF_GGML = {
    GGMLType.Q4_0: (74.8, 128.0, 60.87, 104.3),
    GGMLType.Q4_1: (61.22, 87.86, 40.28, 56.36),
    GGMLType.Q5_0: (18.35, 31.95, 14.57, 25.87),
    GGMLType.Q5_1: (14.54, 20.56, 9.55, 13.1),
    GGMLType.Q8_0: (0.2891, 0.5081, 0.2853, 0.4854),
    GGMLType.Q2_K: (877.9, 1194.0, 552.9, 696.3),
    GGMLType.Q3_K: (231.3, 338.6, 182.1, 266.6),
    GGMLType.Q4_K: (50.97, 74.99, 41.65, 59.32),
    GGMLType.Q5_K: (13.26, 19.03, 10.85, 15.56),
    GGMLType.Q6_K: (3.159, 5.217, 2.616, 4.271),
    GGMLType.IQ4_NL: (58.51, 84.58, 49.22, 69.35),
    GGMLType.IQ4_XS: (59.33, 86.02, 50.34, 71.55),
}

by_name = {"ids": lambda type: type.name}


def random_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Normal rows, heavy-tailed rows, and an importance of their columns."""
    random = np.random.default_rng(0)
    normal = random.standard_normal((64, 512))
    heavy = random.standard_t(4, (64, 512))
    importance = np.exp(random.standard_normal(512))
    first, second, third = (
        torch.from_numpy(values.astype(np.float32)) for values in (normal, heavy, importance)
    )
    return first, second, third


def error_of(type: GGMLType, rows: Tensor, data: Tensor, importance: Tensor | float) -> float:
    """Squared error in 1/10,000 of the sum of squares."""
    error = (dequantize(type, data) - rows).double().square() * importance
    return 1e4 * float(error.sum() / (rows.double().square() * importance).sum())


@pytest.mark.parametrize("type", BLOCKS, **by_name)
def test_error_is_less_than_that_of_ggml(type: GGMLType) -> None:
    normal, heavy, importance = random_rows()
    recorded = ERROR_OF_GGML[type]
    rounding = 1e-3 if type in LIKE_GGML else 0.0  # the same bytes; recorded with four digits
    for rows, bound in zip((normal, heavy), recorded[:2], strict=True):
        assert error_of(type, rows, quantize_to_blocks(type, rows), 1.0) < bound * (1 + rounding)
    for rows, bound in zip((normal, heavy), recorded[2:], strict=True):
        data = quantize_to_blocks(type, rows, importance)
        assert error_of(type, rows, data, importance) < bound


def rows_of_every_kind() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    normal = random.standard_normal((64, 96))
    return {
        "normal": normal,
        "ties": np.round(normal * 4) / 64,
        "magnitudes": normal * np.exp(random.uniform(-16, 6, (64, 96))),
        "tiny": normal * 1e-7,  # of scales that are denormal in float16, or 0
        "one sign": np.abs(normal) + 1,
        "zeros": np.zeros((2, 64)),
        "negative zeros": -np.zeros((2, 64)),
        "constant": np.full((2, 64), -0.3),
        "one value": np.eye(64),
        "two extremes": np.tile([1.0, -1.0, 0.5, 0.25], (2, 16)),
    }


@pytest.mark.parametrize("kind", rows_of_every_kind())
@pytest.mark.parametrize("type", [*LIKE_GGML, *FLOAT_TYPES], **by_name)
def test_bytes_are_those_of_the_gguf_package(type: GGMLType, kind: str) -> None:
    rows = rows_of_every_kind()[kind].astype(np.float32)
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type)).view(np.uint8)
    np.testing.assert_array_equal(
        quantize_to_blocks(type, torch.from_numpy(rows)).numpy(), expected
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("type", BLOCKS, **by_name)
def test_rows_of_every_kind(type: GGMLType, weighted: bool) -> None:
    """No value is off by more than a step between levels that span its row, or what is lost of a
    scale that is tiny."""
    kinds = [np.tile(rows[:8], 4)[:, :256] for rows in rows_of_every_kind().values()]
    rows = torch.from_numpy(np.concatenate(kinds)).float()
    before = rows.clone()
    importance = torch.linspace(0.5, 2, 256) if weighted else None
    values = dequantize(type, quantize_to_blocks(type, rows, importance))
    assert torch.equal(rows, before)
    step = rows.abs().amax(1, keepdim=True) / {GGMLType.Q2_K: 1.3, GGMLType.Q3_K: 3}.get(type, 7)
    assert ((values - rows).abs() <= step + 1e-6).all()


@pytest.mark.parametrize("type", BLOCKS, **by_name)
def test_values_that_a_type_can_hold_hardly_change(type: GGMLType) -> None:
    normal, _, importance = random_rows()
    held = dequantize(type, quantize_to_blocks(type, normal))
    again = dequantize(type, quantize_to_blocks(type, held, importance))
    first_error, second_error = (held - normal).square().sum(), (again - held).square().sum()
    assert second_error <= 0.05 * first_error


def test_large_values_are_given_more_care() -> None:
    """By the weight that the module promises, and not by more."""
    normal, _, _ = random_rows()
    blocks = normal.view(-1, 256)
    promised = (2 * blocks.square().mean(1, keepdim=True) + blocks.square()).sqrt()
    error = (
        dequantize(GGMLType.Q2_K, quantize_to_blocks(GGMLType.Q2_K, normal)).view(-1, 256) - blocks
    )
    x = blocks.view(-1, 16, 16).permute(2, 1, 0)
    for power in (0, 2):  # of other weights
        weights = promised.pow(power).view(-1, 16, 16).permute(2, 1, 0)
        other = fit_affine(x, weights, IntegerLevels(0, 3), IntegerLevels(0, 15))
        difference = (other.d * other.s * other.q - other.e * other.t - x).permute(2, 1, 0)
        sums = [(promised * e.reshape(-1, 256).square()).sum() for e in (error, difference)]
        assert sums[0] < 0.99 * sums[1], power


@pytest.mark.parametrize("type", BLOCKS, **by_name)
def test_important_columns_have_less_error(type: GGMLType) -> None:
    normal, _, _ = random_rows()
    importance = torch.ones(512)
    importance[::4] = 50
    plain = dequantize(type, quantize_to_blocks(type, normal, torch.ones(512))) - normal
    cared = dequantize(type, quantize_to_blocks(type, normal, importance)) - normal
    assert cared[:, ::4].square().sum() < 0.9 * plain[:, ::4].square().sum()


@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K], **by_name)
def test_only_ratios_of_importance_matter(type: GGMLType) -> None:
    normal, _, importance = random_rows()
    importance[7] = 0
    data = quantize_to_blocks(type, normal[:4], importance)
    assert torch.equal(quantize_to_blocks(type, normal[:4], importance * 2.0**-20), data)
    nothing_known = quantize_to_blocks(type, normal[:4], torch.zeros(512))
    assert torch.equal(nothing_known, quantize_to_blocks(type, normal[:4], torch.ones(512)))


def test_column_without_importance_keeps_its_values() -> None:
    normal, _, importance = random_rows()
    importance[64:128] = 0
    values = dequantize(GGMLType.Q4_K, quantize_to_blocks(GGMLType.Q4_K, normal, importance))
    error = (values - normal)[:, 64:128].square().mean()
    assert error < 0.03 * normal.square().mean()


@pytest.mark.parametrize("type", QUANTIZABLE, **by_name)
def test_rows_are_independent(type: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunks in which they are quantized, down to less than a row."""
    normal = random_rows()[0][:13]
    whole = quantize_to_blocks(type, normal)
    assert whole.dtype == torch.uint8 and whole.shape == (13, row_bytes(type, 512))
    monkeypatch.setattr(gguf_quantize, "_CHUNK_VALUES", 5 * 512)
    assert torch.equal(quantize_to_blocks(type, normal), whole)
    monkeypatch.setattr(gguf_quantize, "_CHUNK_VALUES", 100)
    assert torch.equal(quantize_to_blocks(type, normal[:3]), whole[:3])


@pytest.mark.parametrize("type", QUANTIZABLE, **by_name)
def test_no_rows(type: GGMLType) -> None:
    columns = 2 * block_shape(type)[0]
    data = quantize_to_blocks(type, torch.empty(0, columns))
    assert data.shape == (0, row_bytes(type, columns))


@pytest.mark.parametrize("type", QUANTIZABLE, **by_name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(type: GGMLType, value: float) -> None:
    rows = torch.zeros(5, 256)
    rows[3, 17] = value
    with pytest.raises(ValueError, match=f"row 3 .*not finite.*{type.name}"):
        quantize_to_blocks(type, rows)


@pytest.mark.parametrize("type", QUANTIZABLE, **by_name)
def test_values_that_float16_cannot_hold(type: GGMLType) -> None:
    rows = torch.zeros(5, 256)
    rows[2, 0] = -1e6
    if type in (GGMLType.F32, GGMLType.BF16):
        assert torch.allclose(dequantize(type, quantize_to_blocks(type, rows)), rows, rtol=4e-3)
    else:
        with pytest.raises(ValueError, match=f"row 2 has a value over 65504.*{type.name}"):
            quantize_to_blocks(type, rows)
    rows[2, 0] = 60000.0
    assert dequantize(type, quantize_to_blocks(type, rows)).isfinite().all()


def test_rows_that_are_not_whole_blocks() -> None:
    with pytest.raises(ValueError, match="Q4_K rows hold a multiple of 256 values, not 576"):
        quantize_to_blocks(GGMLType.Q4_K, torch.zeros(1, 576))


def test_importance_that_does_not_fit() -> None:
    rows = torch.zeros(2, 256)
    with pytest.raises(ValueError, match=r"shape \(64,\), but rows have 256"):
        quantize_to_blocks(GGMLType.Q4_K, rows, torch.ones(64))
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="negative or not finite"):
            quantize_to_blocks(GGMLType.Q4_K, rows, torch.full((256,), value))


@pytest.mark.parametrize("type", [GGMLType.Q8_K, GGMLType.IQ2_XS, GGMLType.I32], **by_name)
def test_types_that_octavo_does_not_write(type: GGMLType) -> None:
    with pytest.raises(ValueError, match=f"cannot quantize to {type.name}; choose one of.*Q4_K"):
        quantize_to_blocks(type, torch.zeros(1, 256))
