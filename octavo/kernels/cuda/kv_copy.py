"""Copies blocks within the KV cache, in Triton: many in one launch, for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048  # words of 4 bytes that a program copies of each unit
_MOST = 4  # memories of a launch: keys, values and the scales of both


def copy_units(memories: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Compute :func:`octavo.runtime.kv_cache.copy_units` on a GPU."""
    if pairs:
        device = memories[0].device
        # The allocator does not reuse pinned memory before it was copied.
        given = torch.tensor(pairs, dtype=torch.int32, pin_memory=device.type == "cuda")
        launch_copies(memories, given.to(device, non_blocking=True))


def launch_copies(memories: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy units of ``memories``, [layers, units, ...] each and contiguous, of any type.

    ``pairs`` are int32 [N, 2], a source and a target, copied in order: a target can be the source
    of a later pair. A target of -1 is skipped.
    """
    assert len(memories) <= _MOST
    words = [memory.flatten(2).view(torch.int32) for memory in memories]
    num_layers, num_units, _ = words[0].shape
    sizes = [memory.shape[2] for memory in words]
    missing = _MOST - len(words)
    grid = (triton.cdiv(max(sizes), _WORDS), num_layers, len(words))
    _copy[grid](
        *words,
        *[None] * missing,
        *sizes,
        *[0] * missing,
        pairs,
        len(pairs),
        num_units,
        WORDS=_WORDS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_units"])
def _copy(
    first,
    second,
    third,
    fourth,
    first_size,
    second_size,
    third_size,
    fourth_size,
    pairs,
    num_pairs,
    num_units,
    WORDS: tl.constexpr,
):
    """One program handles a piece of a unit, layer and memory, and no other program touches that
    piece."""
    which = tl.program_id(2)
    if which == 0:
        _copy_piece(first, first_size, pairs, num_pairs, num_units, WORDS)
    if second is not None and which == 1:
        _copy_piece(second, second_size, pairs, num_pairs, num_units, WORDS)
    if third is not None and which == 2:
        _copy_piece(third, third_size, pairs, num_pairs, num_units, WORDS)
    if fourth is not None and which == 3:
        _copy_piece(fourth, fourth_size, pairs, num_pairs, num_units, WORDS)


@triton.jit
def _copy_piece(words, size, pairs, num_pairs, num_units, WORDS: tl.constexpr):
    place = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    first = tl.program_id(1).to(tl.int64) * num_units
    # No load may move before a store of the previous iteration.
    for pair in tl.range(0, num_pairs, num_stages=1):
        source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        if target >= 0:
            moved = tl.load(words + (first + source) * size + place, mask=place < size)
            tl.store(words + (first + target) * size + place, moved, mask=place < size)
        tl.debug_barrier()
