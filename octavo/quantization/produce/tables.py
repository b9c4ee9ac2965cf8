"""Codes that stand for the entries of a table: FP8 and NF4.

Both take a matrix, float32 [N, K], and round each value to the nearest entry times the scale of its
group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantization.levels import E4M3, FP8_BLOCK, NF4_BLOCK, NF4_LEVELS

_FP8_MAX = 448.0


def to_fp8(weight: Tensor) -> CodedWeight:
    """FP8 (e4m3, to the nearest, ties to even), with a scale for each row: its largest is 448."""
    rows, columns = weight.shape
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
    codes = (weight / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return CodedWeight(
        "fp8",
        (rows, columns),
        8,
        columns,
        PlainCodes(codes.view(torch.uint8).numpy()),
        scales.numpy(),
        0.0,
        E4M3,
        None,
        weight.numel() + 4 * rows,
    )


def to_fp8_blocks(weight: Tensor) -> CodedWeight:
    """The same with a scale for each block of 128 rows and 128 columns."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(-(-rows // FP8_BLOCK), FP8_BLOCK, -1, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / _FP8_MAX, 1.0).repeat_interleave(FP8_BLOCK, dim=0)
    scales = scales[:rows].contiguous()
    by_column = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    codes = (weight / by_column).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return CodedWeight(
        "fp8",
        (rows, columns),
        8,
        FP8_BLOCK,
        PlainCodes(codes.view(torch.uint8).numpy()),
        scales.numpy(),
        0.0,
        E4M3,
        None,
        weight.numel() + 4 * largest.numel(),
    )


def to_nf4(weight: Tensor) -> CodedWeight:
    """NF4, in blocks of 64 with the largest magnitude for a scale. ConfigError if a row is no
    whole number of blocks."""
    rows, columns = weight.shape
    if columns % NF4_BLOCK:
        raise ConfigError(f"NF4 has blocks of {NF4_BLOCK} values, and rows have {columns}")
    blocks = weight.reshape(rows, -1, NF4_BLOCK)
    scales = blocks.abs().amax(dim=2)
    unit = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    levels = torch.from_numpy(NF4_LEVELS)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return CodedWeight(
        "nf4",
        (rows, columns),
        4,
        NF4_BLOCK,
        PlainCodes(codes.view(rows, columns).numpy()),
        scales.numpy(),
        0.0,
        NF4_LEVELS,
        None,
        weight.numel() // 2 + 4 * scales.numel(),
    )
