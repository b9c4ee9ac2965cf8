"""MXFP4 as gpt-oss and GGUF files have it, against a decoder of one value at a time."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.quantization.formats.mxfp4 import MXFP4, read_blocks
from octavo.quantization.formats.stored import StoredTensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def value(code: int, exponent: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    return sign * MAGNITUDES[code & 7] * 2.0 ** (int(exponent) - 127)


def stored(tmp_path, name: str, data: np.ndarray) -> StoredTensor:
    return StoredTensor("U8", data.shape, data, tmp_path / "model.safetensors", name)


def test_parts_are_found_by_their_names(tmp_path):
    format = MXFP4(Fields(tmp_path / "config.json", {}))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert format.part(f"{name}_blocks") == (name, "blocks")
    assert format.part(f"{name}_scales") == (name, "scales")
    assert format.part(f"{name}_bias") is None


def test_rows_of_all_experts_are_one_below_the_other(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), dtype=np.uint8)
    scales = rng.integers(117, 137, (3, 5, 2), dtype=np.uint8)
    parts = {"blocks": stored(tmp_path, "b", blocks), "scales": stored(tmp_path, "s", scales)}
    weight = MXFP4(Fields(tmp_path / "config.json", {})).assemble("w", parts)
    assert weight.shape == (15, 64)
    expected = [
        [
            value(blocks[e, row, k // 32, k % 32 // 2] >> 4 * (k % 2) & 15, scales[e, row, k // 32])
            for k in range(64)
        ]
        for e in range(3)
        for row in range(5)
    ]
    np.testing.assert_array_equal(weight.dequantize(), np.array(expected, np.float32))


def test_blocks_of_ggml():
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (4, 3 * 17), dtype=np.uint8)
    data[:, ::17] = rng.integers(120, 130, (4, 3), dtype=np.uint8)
    weight = read_blocks(data)
    assert weight.shape == (4, 96) and weight.nbytes == data.nbytes
    for row, block, i in np.ndindex(4, 3, 32):
        byte = data[row, block * 17 + 1 + i % 16]
        code = byte >> 4 if i >= 16 else byte & 15
        assert weight.dequantize()[row, block * 32 + i] == value(code, data[row, block * 17])


@pytest.mark.parametrize(
    ("blocks", "scales"), [((2, 3, 1, 15), (2, 3, 1)), ((2, 3, 2, 16), (2, 3, 1))]
)
def test_parts_that_do_not_fit_are_refused(tmp_path, blocks, scales):
    parts = {
        "blocks": stored(tmp_path, "b", np.zeros(blocks, np.uint8)),
        "scales": stored(tmp_path, "s", np.zeros(scales, np.uint8)),
    }
    with pytest.raises(ModelFileError):
        MXFP4(Fields(tmp_path / "config.json", {})).assemble("w", parts)
