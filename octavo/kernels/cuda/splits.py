"""Split-K products of few rows: inputs are split among programs so that the whole GPU has work.

    program (tile, split)   the sums of one tile of outputs over one split of the inputs
        '-- stored as a part; the last program of a tile to finish adds up its parts

Parts are added in the order of the splits, whichever program is last: a result has the same bits
each time. The number of splits depends on the shape of the weight and on the GPU, never on the
rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_STEPS = 4  # of ``block_k`` inputs, the fewest of a split


@dataclass(frozen=True, slots=True)
class Tiling:
    """Division of a product into programs of ``rows`` rows and ``block_n`` outputs each.

    The inputs are ``splits`` runs of ``split_k``, the last one perhaps shorter, which are processed
    ``block_k`` at a time.
    """

    num_tiles: int
    block_n: int
    block_k: int
    splits: int
    split_k: int
    part_size: int  # numbers that a program stores for the last one
    rows: int = 16
    row_tiles: int = 1  # most tiles of rows in one launch
    num_warps: int = 4
    num_stages: int = 4

    @property
    def max_rows(self) -> int:
        return self.rows * self.row_tiles

    @property
    def num_counters(self) -> int:
        return self.num_tiles * self.row_tiles if self.splits > 1 else 0

    @property
    def parts_size(self) -> int:
        return self.num_counters * self.splits * self.part_size

    def grid(self, num_rows: int) -> tuple[int, int, int]:
        """The launch grid. Programs of the same outputs follow each other, so that all but the
        first find the weight in the cache."""
        return triton.cdiv(num_rows, self.rows), self.num_tiles, self.splits


def cut(
    n: int,
    k: int,
    num_processors: int,
    *,
    block_n: int,
    block_k: int,
    programs_each: int,
    part_size: int,
    rows: int = 16,
    row_tiles: int = 1,
    of_outputs: int | None = None,
) -> Tiling:
    """The tiling for a weight of n outputs and k inputs: ``programs_each`` programs for each
    multiprocessor, unless splits get too short.

    ``of_outputs``: the number of splits is that of a weight of so many outputs.
    """
    num_tiles, steps = triton.cdiv(n, block_n), triton.cdiv(k, block_k)
    whole_tiles = num_tiles if of_outputs is None else triton.cdiv(of_outputs, block_n)
    wanted = triton.cdiv(programs_each * num_processors, whole_tiles)
    steps_each = triton.cdiv(steps, max(1, min(wanted, steps // _MIN_STEPS)))
    splits = triton.cdiv(steps, steps_each)
    split_k = steps_each * block_k
    return Tiling(num_tiles, block_n, block_k, splits, split_k, part_size, rows, row_tiles)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for the parts of one product at a time, which the products of a stream share.

    Each product leaves the counters at 0, as it found them.
    """

    parts: Tensor  # float32
    counters: Tensor  # int32

    @classmethod
    def for_all(cls, tilings: Iterable[Tiling], device: torch.device | str) -> Workspace:
        """A workspace that is large enough for any of these tilings."""
        made = list(tilings)
        num_parts = max((tiling.parts_size for tiling in made), default=0)
        num_counters = max((tiling.num_counters for tiling in made), default=0)
        return cls(
            torch.empty(num_parts, dtype=torch.float32, device=device),
            torch.zeros(num_counters, dtype=torch.int32, device=device),
        )

    def check(self, tiling: Tiling) -> None:
        assert self.parts.numel() >= tiling.parts_size
        assert self.counters.numel() >= tiling.num_counters


@triton.jit
def add_product(sums, a, b):
    """sums (float32) + a @ b, of one type."""
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def arrives_last(counter, NUM: tl.constexpr):
    """True if NUM - 1 programs arrived before this one, which then sees all that they stored, and
    has reset the counter to 0."""
    tl.debug_barrier()  # all threads of this program have stored their part
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == NUM - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def sum_parts(places, stride, NUM: tl.constexpr):
    """Sum of the numbers at ``places`` in the first part and in all others, each ``stride`` behind
    the one before it, in this order."""
    total = tl.load(places, cache_modifier=".cg")
    for part in tl.static_range(1, NUM):
        total += tl.load(places + part * stride, cache_modifier=".cg")
    return total
