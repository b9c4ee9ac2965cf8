"""Splits quantized GGUF blocks into levels, scales and offsets.

    value = scale * level + offset

Only gguf_formats.py, which reads blocks, and gguf_blocks.py, which writes them, know the layout of
a type. So the fields are found by experiment: the bytes of levels are those that change when other
levels are packed; blocks with their own levels and scales of 1 dequantize to the levels, and blocks
with their own scales and one level everywhere to the scales.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.quantization.ggml_types import GGMLType, block_shape
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import SEARCHED, Affine
from octavo.quantization.gguf_search import FIXED


class Fields(NamedTuple):
    """Fields of rows: ``levels`` float32 [n, K], integers; ``scales`` and ``offsets`` float32
    [n, K / width], one for each sub-block of ``width`` values."""

    levels: Tensor
    scales: Tensor
    offsets: Tensor
    width: int


def fields_of(type: GGMLType, data: Tensor) -> Fields:
    """The fields of rows, uint8 [n, row_bytes(type, K)], of one of the types in ``SEARCHED``.

    Levels are counted as in ``gguf_quantize.py``: -8 to 7 for Q4_0, 0 to 15 for Q4_1, the integers
    of its table for IQ4_NL. Scales and offsets have the precision of float32.
    """
    format, (values, size) = SEARCHED[type], block_shape(type)
    low, high = format.levels.low, format.levels.high
    lowest, highest = (_block(type, level).to(data.device) for level in (low, high))
    is_level = lowest != highest
    blocks = data.reshape(-1, size)

    def of_level(block: Tensor) -> Tensor:
        """First value of each sub-block, [blocks, sub-blocks], when the levels are those of
        ``block``."""
        found = dequantize(type, torch.where(is_level, block, blocks))
        return found.view(-1, values // format.sub_block, format.sub_block)[:, :, 0]

    levels = dequantize(type, torch.where(is_level, blocks, lowest))  # whose scales are 1
    offsets = of_level(lowest) if isinstance(format, Affine) else torch.zeros(1, device=data.device)
    scales = (of_level(highest) - offsets) / high
    rows = len(data)
    return Fields(
        levels.view(rows, -1),
        scales.view(rows, -1),
        offsets.expand_as(scales).reshape(rows, -1),
        format.sub_block,
    )


@cache
def _block(type: GGMLType, level: int) -> Tensor:
    """A block with one level everywhere, scales of 1 and offsets of 0: uint8 [1, bytes]."""
    format, (values, _) = SEARCHED[type], block_shape(type)
    one, zero = torch.ones(1), torch.zeros(1)
    levels = torch.full((1, values), float(level))
    ones = torch.ones(1, values // format.sub_block)
    has_scales = format.scales != FIXED
    if isinstance(format, Affine):
        integers = (ones, 0 * ones) if has_scales else ()
        return format.pack(one, zero, *integers, levels)
    return format.pack(one, *((ones,) if has_scales else ()), levels)
