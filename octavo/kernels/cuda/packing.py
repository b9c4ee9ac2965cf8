"""Weights of 4 bits in the order in which the GPU's kernels read them.

    words [K / 8, N]    of each 128 inputs, word r holds those 16 apart from r on:

        word r    | r | r + 16 | r + 32 | ... | r + 112 |     4 bits each, the lowest first

So one nibble of 16 words is 16 consecutive inputs of an output: a tile of a matrix as it is, with
nothing to put into another order. Outputs lie side by side, as the threads that read them do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.coded import as_integers
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.ggml_types import GGMLType

TILE_K = 128  # inputs of 16 words, of which a kernel reads all
PLANES = 8  # nibbles of a word
PLANE_K = TILE_K // PLANES


@dataclass(frozen=True, slots=True, eq=False)
class W4Weight:
    """A matrix [N, K] of codes in 0 to 15: value = scale * code + min, or scale * (code - 8).

    ``group`` inputs share a scale: 32, 64 or 128. K is padded to K', a multiple of TILE_K, with
    groups whose scales and mins are 0.
    """

    words: Tensor  # int32 [K' / 8, N]
    scales: Tensor  # float16 [K' / group, N]
    mins: Tensor | None  # likewise; None: a code of 8 stands for 0
    group: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        parts = (self.words, self.scales, self.mins)
        return sum(part.nbytes for part in parts if part is not None)


class _Codes(NamedTuple):
    """What a weight is made of: uint8 [N, K], and float16 [N, groups]."""

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    group: int


def pack_w4(weight: Weight, device: torch.device | str) -> W4Weight | None:
    """A weight as the kernels of ``quantized_linear.py`` read it; None if it is no such weight.

    GGUF's Q4_0 and Q4_1, and codes of 4 bits whose scales float16 can hold, as those of GPTQ, AWQ
    and compressed-tensors, in groups of 32 or a multiple of it that follow each other.
    """
    if isinstance(weight, StoredWeight):
        made = _codes_of_blocks(weight)
    elif isinstance(weight, CodedWeight):
        made = _codes_of_integers(weight)
    else:
        made = None
    if made is None:
        return None
    n, k = made.codes.shape
    return W4Weight(
        _words(made.codes.to(device)),
        _by_group(made.scales.to(device), made.group, k),
        None if made.mins is None else _by_group(made.mins.to(device), made.group, k),
        made.group,
        (n, k),
    )


def _codes_of_blocks(weight: StoredWeight) -> _Codes | None:
    """Of GGUF's blocks of 32: float16 first, then bytes with value i low and value 16 + i high."""
    num_halves = {GGMLType.Q4_0: 1, GGMLType.Q4_1: 2}.get(weight.type)
    if num_halves is None:
        return None
    n, k = weight.shape
    blocks = torch.from_numpy(weight.data.reshape(n, k // 32, -1).copy())
    halves = blocks[..., : 2 * num_halves].contiguous().view(torch.float16)
    packed = blocks[..., 2 * num_halves :]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1).view(n, k)
    return _Codes(codes, halves[..., 0], halves[..., 1] if num_halves == 2 else None, 32)


def _codes_of_integers(weight: CodedWeight) -> _Codes | None:
    integers = as_integers(weight)
    if integers is None or integers.format not in (abi.OCT_W4S, abi.OCT_W4A):
        return None
    codes, scales, mins = integers.read(weight)
    return _Codes(
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        None if mins is None else torch.from_numpy(mins),
        integers.group,
    )


def _words(codes: Tensor) -> Tensor:
    """int32 [K' / 8, N] of codes [N, K]."""
    n, k = codes.shape
    planes = F.pad(codes, (0, -k % TILE_K)).view(n, -1, PLANES, PLANE_K)
    words = planes[:, :, 0].int()
    for plane in range(1, PLANES):
        words |= planes[:, :, plane].int() << 4 * plane
    return words.reshape(n, -1).t().contiguous()


def _by_group(numbers: Tensor, group: int, k: int) -> Tensor:
    """[K' / group, N] of numbers [N, K / group]."""
    num_groups = -(-k // TILE_K) * (TILE_K // group)
    return F.pad(numbers, (0, num_groups - numbers.shape[1])).t().contiguous()
