"""FP8 checkpoints, with scales of tensors, rows and blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized import float8, parts_of

from octavo.base.errors import ModelFileError
from octavo.quantization.formats.registry import open_format
from octavo.quantization.levels import E2M1, E4M3, E5M2, E8M0

PATH = Path("config.json")


def assemble(tensors, **config):
    format = open_format({"quant_method": "fp8", **config}, PATH)
    return format.assemble("m.weight", parts_of(format, tensors))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("block", [(200, 300), (1, 300), (128, 128), (64, 32)])
def test_scales(name, block):
    packed = float8(np.random.default_rng(0), 200, 300, block, name)
    config = {"weight_block_size": list(block)} if block[1] < 300 else {}
    weight = assemble(packed.tensors, **config)
    assert (weight.shape, weight.bits, weight.format) == ((200, 300), 8, "fp8")
    np.testing.assert_array_equal(weight.dequantize(), packed.values)
    assert np.array_equal(weight.dequantize(100, 150), packed.values[100:150])


def test_a_scale_without_dimensions():
    packed = float8(np.random.default_rng(0), 16, 16, (16, 16), "weight_scale")
    packed.tensors["weight_scale"] = packed.tensors["weight_scale"].view(())
    np.testing.assert_array_equal(assemble(packed.tensors).dequantize(), packed.values)


def test_the_other_float8():
    packed = float8(np.random.default_rng(0), 16, 32, (1, 32), "weight_scale")
    packed.tensors["weight"] = torch.randn(16, 32).to(torch.float8_e5m2)
    exact = packed.tensors["weight"].float() * packed.tensors["weight_scale"]
    np.testing.assert_array_equal(assemble(packed.tensors).dequantize(), exact.numpy())


def test_scales_that_are_powers_of_two():
    packed = float8(np.random.default_rng(0), 8, 8, (4, 4), "weight_scale_inv")
    scales = torch.tensor([[0.25, 4.0], [1.0, 2.0]])
    packed.tensors["weight_scale_inv"] = scales.to(torch.float8_e8m0fnu)
    weight = assemble(packed.tensors, weight_block_size=[4, 4])
    assert np.array_equal(weight.scales, scales.repeat_interleave(4, dim=0))


def test_tables_are_those_of_pytorch():
    codes = torch.arange(256, dtype=torch.uint8)
    types = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
    for table, dtype in zip((E4M3, E5M2, E8M0), types, strict=True):
        np.testing.assert_array_equal(table, codes.view(dtype).float().numpy())
        assert table.dtype == np.float32
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_what_does_not_fit():
    packed = float8(np.random.default_rng(0), 200, 300, (128, 128), "weight_scale_inv")
    with pytest.raises(ModelFileError, match=r"m\.weight_scale_inv.*\[2, 3\], not \[200, 1\]"):
        assemble(packed.tensors)
    with pytest.raises(ModelFileError, match=r"not \[4, 5\].*block of 64 x 64 of 200 x 300"):
        assemble(packed.tensors, weight_block_size=[64, 64])
    with pytest.raises(ModelFileError, match="weight_block_size.*2 entries"):
        assemble(packed.tensors, weight_block_size=[64])
    with pytest.raises(ModelFileError, match=r"m\.weight\).*weight_scale is missing"):
        assemble({"weight": packed.tensors["weight"]})
    weight = packed.tensors["weight"].view(torch.uint8)
    with pytest.raises(ModelFileError, match=r"m\.weight\).*U8, not F8_E4M3 or F8_E5M2"):
        assemble({**packed.tensors, "weight": weight})
