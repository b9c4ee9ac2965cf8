"""Weights as they are in files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from weights import stored

from octavo.quantization.base import StoredWeight, float_bytes
from octavo.quantization.ggml_types import READABLE_TYPES, GGMLType
from octavo.quantization.gguf_formats import DEQUANTIZERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_every_type(dtype):
    """All numbers of 16 bits are among them: infinite, NaN, denormal and huge ones."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    if dtype == torch.float32:
        bits = bits.int() * 0x10001
    tensor = bits.view(dtype).view(256, -1)
    weight = stored(tensor)
    assert not weight.is_quantized and weight.nbytes == tensor.nbytes
    floats = weight.floats()
    assert floats.dtype == np.float32 and floats.shape == tensor.shape
    np.testing.assert_array_equal(floats, tensor.float().numpy())
    floats[:] = 0
    np.testing.assert_array_equal(weight.floats(), tensor.float().numpy())  # it was a copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_rounded_as_torch_does(dtype):
    """Halves of a last place, what becomes infinite or denormal, and both zeros among them."""
    bits = torch.arange(-(2**15), 2**15).unsqueeze(1) * 2**16
    values = torch.cat([bits + low for low in (0, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)], dim=1)
    floats = values.int().view(torch.float32)
    floats = floats[~floats.isnan().any(dim=1)]
    expected = stored(floats.to(dtype))
    written = float_bytes(floats.numpy(), expected.type)
    np.testing.assert_array_equal(written, expected.data)
    nan = np.array([np.nan, -np.nan], np.float32)
    bad = StoredWeight(expected.type, float_bytes(nan, expected.type)[None], (1, 2))
    assert np.isnan(bad.floats()).all()


def test_shapes_of_fewer_dimensions():
    for shape in ((), (3,), (0,), (0, 4), (2, 0)):
        size = int(np.prod(shape, dtype=int))
        rows = int(np.prod(shape[:-1], dtype=int))
        data = np.arange(size, dtype=np.float32).view(np.uint8).reshape(rows, -1 if size else 0)
        if shape == (0, 4):
            data = np.empty((0, 16), dtype=np.uint8)
        assert StoredWeight(GGMLType.F32, data, shape).floats().shape == shape


def test_shape_and_bytes_must_match():
    data = np.zeros((6, 2 * 34), dtype=np.uint8)
    assert StoredWeight(GGMLType.Q8_0, data, (6, 64)).is_quantized
    for bad, shape in ((data, (6, 32)), (data.view(np.int8), (6, 64)), (data[:5], (6, 64))):
        with pytest.raises(AssertionError):
            StoredWeight(GGMLType.Q8_0, bad, shape)


def test_what_is_called_readable_can_be_read():
    # MXFP4 is read as codes with scales.
    assert set(READABLE_TYPES) == {*DEQUANTIZERS, GGMLType.MXFP4}
