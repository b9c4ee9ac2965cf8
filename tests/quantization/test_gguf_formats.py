"""Dequantization gives the bits of the ``gguf`` package, for every type that octavo reads."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES

from octavo.base.errors import UnsupportedModelError
from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_formats import DEQUANTIZERS, dequantize

TYPES = pytest.mark.parametrize("type", DEQUANTIZERS, ids=lambda type: type.name)

# Where the float scales of a block are: (struct format, byte offsets).
SCALES: dict[GGMLType, tuple[str, tuple[int, ...]]] = {
    GGMLType.F32: ("<f", (0,)),
    GGMLType.F16: ("<e", (0,)),
    GGMLType.BF16: ("<H", ()),
    GGMLType.Q4_0: ("<e", (0,)),
    GGMLType.Q4_1: ("<e", (0, 2)),
    GGMLType.Q5_0: ("<e", (0,)),
    GGMLType.Q5_1: ("<e", (0, 2)),
    GGMLType.Q8_0: ("<e", (0,)),
    GGMLType.Q2_K: ("<e", (80, 82)),
    GGMLType.Q3_K: ("<e", (108,)),
    GGMLType.Q4_K: ("<e", (0, 2)),
    GGMLType.Q5_K: ("<e", (0, 2)),
    GGMLType.Q6_K: ("<e", (208,)),
    GGMLType.Q8_K: ("<f", (0,)),
    GGMLType.IQ4_NL: ("<e", (0,)),
    GGMLType.IQ4_XS: ("<e", (0,)),
}


def random_blocks(type: GGMLType, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes for blocks of the given shape: uint8 [*shape[:-1], shape[-1] * bytes]."""
    rng = np.random.default_rng([seed, type])
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * block_shape(type)[1]), dtype=np.uint8)


def q8_k_formula(data: np.ndarray) -> np.ndarray:
    """One block at a time with struct, because the gguf package cannot dequantize Q8_K."""
    values = []
    for start in range(0, data.size, 292):
        d, *quants = struct.unpack_from("<f256b", data.tobytes(), start)
        values += [np.float32(d) * np.float32(q) for q in quants]
    return np.array(values, np.float32).reshape(*data.shape[:-1], -1)


def expected_values(type: GGMLType, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # random scales include infinities
        if type == GGMLType.Q8_K:
            return q8_k_formula(data)
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(type))


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    assert got.dtype == torch.float32 and got.shape == expected.shape
    values, nan = got.cpu().numpy(), np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)  # but any payload will do
    np.testing.assert_array_equal(values.view(np.int32)[~nan], expected.view(np.int32)[~nan])


def test_types_are_those_of_ggml() -> None:
    assert {t.name: int(t) for t in GGMLType} == {
        t.name: int(t) for t in gguf.GGMLQuantizationType if t.name in GGMLType.__members__
    }
    for type in GGMLType:
        assert block_shape(type) == GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)]


def test_the_types_of_the_promise_are_there() -> None:
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ4_NL IQ4_XS"
    assert [type.name for type in DEQUANTIZERS] == names.split()


def test_row_bytes() -> None:
    assert row_bytes(GGMLType.Q4_1, 576) == 18 * 20
    assert row_bytes(GGMLType.F32, 3) == 12
    with pytest.raises(ValueError, match="Q4_K rows hold a multiple of 256 values, not 576"):
        row_bytes(GGMLType.Q4_K, 576)


@TYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 7), (64, 2), (2, 3, 2), (2, 1, 3, 1)])
def test_random_bytes(type: GGMLType, shape: tuple[int, ...]) -> None:
    data = random_blocks(type, *shape)
    assert_same_bits(dequantize(type, torch.from_numpy(data)), expected_values(type, data))


@TYPES
def test_every_kind_of_scale(type: GGMLType) -> None:
    form, offsets = SCALES[type]
    exponents = [2.0**-24, 3 * 2.0**-24, 2.0**-15, 2.0**-14, 1.0, 65504.0]  # half: denormal to max
    if form == "<f":
        exponents += [2.0**-149, 2.0**-126, 3e38]
    special = [0.0, *exponents, float("inf"), float("nan")]
    scales = [sign * value for value in special for sign in (1, -1)]
    data = random_blocks(type, len(scales) ** len(offsets), 1)
    for row, block in enumerate(data):
        for offset in offsets:
            row, index = divmod(row, len(scales))
            struct.pack_into(form, block, offset, scales[index])
    assert_same_bits(dequantize(type, torch.from_numpy(data)), expected_values(type, data))


@TYPES
@pytest.mark.parametrize("byte", [0, 255])
def test_uniform_bytes(type: GGMLType, byte: int) -> None:
    data = np.full((2, 2 * block_shape(type)[1]), byte, np.uint8)
    assert_same_bits(dequantize(type, torch.from_numpy(data)), expected_values(type, data))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values(name: str) -> None:
    type = GGMLType[name]
    values = np.random.default_rng(7).standard_normal((33, 96)).astype(np.float32)
    quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType(type))
    data = np.ascontiguousarray(quantized).view(np.uint8)
    assert data.shape[-1] == row_bytes(type, 96)
    result = dequantize(type, torch.from_numpy(data))
    assert_same_bits(result, expected_values(type, data))
    bound = {"F": 1e-3, "B": 2e-2, "Q4": 0.5, "Q5": 0.25, "Q8": 0.03}
    error = np.abs(result.numpy() - values).max()
    assert error < next(bound[key] for key in bound if name.startswith(key))


@TYPES
def test_out_is_filled_and_returned(type: GGMLType) -> None:
    data = torch.from_numpy(random_blocks(type, 6, 3))
    out = torch.full((6, 3 * block_shape(type)[0]), float("nan"))
    for start in (0, 2, 4):  # two rows at a time are the same as all at once
        chunk = dequantize(type, data[start : start + 2], out=out[start : start + 2])
        assert chunk.data_ptr() == out[start].data_ptr()
    assert_same_bits(out, dequantize(type, data).numpy())


@TYPES
def test_views_of_any_layout(type: GGMLType) -> None:
    values, size = block_shape(type)
    data = torch.from_numpy(random_blocks(type, 4, 3))
    whole = dequantize(type, data)

    def check(view: torch.Tensor, expected: torch.Tensor) -> None:
        assert_same_bits(dequantize(type, view), expected.numpy())

    check(data[:, size : 3 * size], whole[:, values : 3 * values])  # some columns
    check(data[::2], whole[::2])
    check(data[2], whole[2])  # a row
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), data.flatten()])[1:].view(4, -1)
    assert odd.storage_offset() == 1
    check(odd, whole)
    assert torch.equal(data, torch.from_numpy(random_blocks(type, 4, 3))), "data was changed"


@TYPES
def test_no_rows(type: GGMLType) -> None:
    data = torch.empty((0, 2 * block_shape(type)[1]), dtype=torch.uint8)
    assert dequantize(type, data).shape == (0, 2 * block_shape(type)[0])


@pytest.mark.parametrize("type", sorted(set(GGMLType) - set(DEQUANTIZERS)), ids=lambda t: t.name)
def test_other_types_are_refused(type: GGMLType) -> None:
    data = torch.zeros(1, block_shape(type)[1], dtype=torch.uint8)
    with pytest.raises(UnsupportedModelError, match=f"{type.name} tensors.*Q4_K"):
        dequantize(type, data)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@TYPES
def test_cuda(type: GGMLType) -> None:
    data = random_blocks(type, 65, 3)
    result = dequantize(type, torch.from_numpy(data).cuda())
    assert result.is_cuda
    assert_same_bits(result, expected_values(type, data))
