"""FP8 (e4m3, e5m2) and NF4, whose codes are entries of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantization.levels import E4M3, E5M2, FP8_BLOCK, NF4_LEVELS

TABLES = {"e4m3": E4M3, "e5m2": E5M2, "nf4": NF4_LEVELS}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "nf4": 1.0}
_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

_NF4 = torch.from_numpy(NF4_LEVELS)
_NF4_BETWEEN = (_NF4[1:] + _NF4[:-1]) / 2


def nearest_levels(values: Tensor, table: str) -> Tensor:
    """Codes of the entries nearest to ``values`` (in units of the scale), float32 of their shape.

    FP8 rounds ties to the even code, and clamps values beyond the largest entry.
    """
    if table in _FLOATS:
        clamped = values.clamp(-LARGEST[table], LARGEST[table])
        return clamped.to(_FLOATS[table]).view(torch.uint8).float()
    return torch.bucketize(values, _NF4_BETWEEN).float()


def levels_of(codes: Tensor, table: str) -> Tensor:
    """The table entries of codes (float32), in units of the scale."""
    if table in _FLOATS:
        return codes.to(torch.uint8).view(_FLOATS[table]).float()
    return _NF4[codes.long()]


def to_fp8_blocks(weight: Tensor) -> CodedWeight:
    """Quantize a matrix, float32 [N, K], to FP8 with a scale for each block of 128 x 128."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(-(-rows // FP8_BLOCK), FP8_BLOCK, -1, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / LARGEST["e4m3"], 1.0)
    scales = scales.repeat_interleave(FP8_BLOCK, dim=0)[:rows].contiguous()
    by_column = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    codes = nearest_levels(weight / by_column, "e4m3").to(torch.uint8)
    return CodedWeight(
        "fp8",
        (rows, columns),
        8,
        FP8_BLOCK,
        PlainCodes(codes.numpy()),
        scales.numpy(),
        0.0,
        weight.numel() + 4 * largest.numel(),
        E4M3,
    )
