"""Blocks of the KV cache copied within it, in Triton: many in one launch, for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048  # of 4 bytes, that a program copies


def copy_blocks(memory: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks of ``memory`` [layers, num_blocks, ...], of any type.

    ``sources`` and ``targets`` are integers [N], block ids; a target of -1 is none. No block may be
    a target and also in another pair: pairs are copied in no order.
    """
    words = memory.flatten(2).view(torch.int32)
    num_layers, num_blocks, size = words.shape
    _copy[(len(sources), triton.cdiv(size, _WORDS), num_layers)](
        words, sources, targets, num_blocks, size, WORDS=_WORDS, num_warps=4
    )


@triton.jit
def _copy(words, sources, targets, num_blocks, size, WORDS: tl.constexpr):
    """A program for each pair, piece of a block, and layer."""
    pair, piece, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(sources + pair), tl.load(targets + pair)
    if target < 0:
        return
    place = piece * WORDS + tl.arange(0, WORDS)
    first = layer.to(tl.int64) * num_blocks
    moved = tl.load(words + (first + source) * size + place, mask=place < size)
    tl.store(words + (first + target) * size + place, moved, mask=place < size)
