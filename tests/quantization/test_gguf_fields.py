"""Fields of blocks: together they are what the blocks dequantize to, and no bit is made up."""

from __future__ import annotations

import pytest
import torch

from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_fields import fields_of
from octavo.quantization.gguf_formats import IQ4_VALUES, dequantize
from octavo.quantization.gguf_quantize import SEARCHED, quantize_to_blocks

ROWS = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)) * 0.2


@pytest.mark.parametrize("type", SEARCHED, ids=lambda type: type.name)
def test_they_are_what_blocks_dequantize_to(type):
    data = quantize_to_blocks(type, ROWS)
    levels, scales, offsets, width = fields_of(type, data)
    assert levels.shape == ROWS.shape
    assert scales.shape == offsets.shape == (5, 512 // width)
    by_column = (each.repeat_interleave(width, dim=1) for each in (scales, offsets))
    values = next(by_column) * levels + next(by_column)
    torch.testing.assert_close(values, dequantize(type, data), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", SEARCHED, ids=lambda type: type.name)
def test_levels_are_those_of_the_type(type):
    found = set(fields_of(type, quantize_to_blocks(type, ROWS)).levels.unique().tolist())
    levels = SEARCHED[type].levels
    possible = set(range(levels.low, levels.high + 1))
    assert found <= (set(IQ4_VALUES) if type.name.startswith("IQ4") else possible)
    assert len(found) > (3 if type == GGMLType.Q2_K else 7)


def test_a_block_by_hand():
    """Q4_1: d = 2, m = -1, the low nibbles 0 to 15, the high ones 15 to 0."""
    nibbles = torch.tensor([i | (15 - i) << 4 for i in range(16)], dtype=torch.uint8)
    halves = torch.tensor([2.0, -1.0]).half().view(torch.uint8)
    levels, scales, offsets, width = fields_of(GGMLType.Q4_1, torch.cat([halves, nibbles])[None])
    assert levels[0].tolist() == [*range(16), *reversed(range(16))]
    assert (scales.tolist(), offsets.tolist(), width) == ([[2.0]], [[-1.0]], 32)
