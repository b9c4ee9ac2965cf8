"""Codes that stand for the entries of a table: FP8 and NF4.

Both take a matrix, float32 [N, K], and round each value to the nearest entry times the scale of its
group.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quantization.coded import CodedWeight, PlainCodes

_FP8_MAX = 448.0
NF4_BLOCK = 64
# The quantiles of a normal distribution, with 0 among them (QLoRA, arXiv 2305.14314, appendix E).
NF4_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


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
        fp8_levels(),
        None,
        weight.numel() + 4 * rows,
    )


def fp8_levels() -> np.ndarray:
    """What the 256 codes of e4m3 stand for; NaN of two of them."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


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
