"""Forward passes of ranks of which each computes the attention of its own sequences.

    pool of the scheduler      0 ... B - 1    B ... 2 B - 1    ...
    is in the memory of        rank 0         rank 1

A sequence has all of its blocks in one rank's pool, which is the rank that attends for it. Rank 0
knows the blocks of all ranks by the scheduler's numbers; block tables have those of their own pool,
which begin with 0. A step has the sequences of each rank next to each other, in the order of ranks;
a rank without any computes no attention, and meets the others all the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch
from octavo.kernels.parts import Part
from octavo.runtime.following_forward import FollowingForward
from octavo.runtime.forward import KVBlocks
from octavo.runtime.leading_forward import LeadingCache, LeadingForward, RecordedTables
from octavo.runtime.native_kv_cache import NativeCache
from octavo.runtime.step_words import HAS_OWNERS, BadMessage, Reader, StepHeader


class PoolOfRank:
    """The blocks of all ranks, by the scheduler's numbers, of which one rank has some: what is done
    to others is not done here."""

    def __init__(self, blocks: KVBlocks, part: Part):
        self._blocks, self._part = blocks, part
        self._own = range(part.rank * blocks.num_blocks, (part.rank + 1) * blocks.num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._part.size * self._blocks.num_blocks

    @property
    def host_blocks(self) -> np.ndarray:
        return self._blocks.host_blocks

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks; both of a pair are in the same pool."""
        first = self._own.start
        self._blocks.copy_blocks(
            [(source - first, target - first) for source, target in copies if source in self._own]
        )

    def wait(self) -> None:
        self._blocks.wait()

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        if block_ids[0] in self._own:
            first = self._own.start
            self._blocks.move([block_id - first for block_id in block_ids], sources, target)


class PoolTables(RecordedTables):
    """Block tables with the numbers that blocks have in their own pools, of ``pool_size``."""

    def __init__(self, pool_size: int, *sizes: int):
        super().__init__(*sizes)
        self._pool_size = pool_size

    def _store(self, group: int, row: int, first: int, entries: Sequence[int]) -> None:
        size = self._pool_size
        super()._store(group, row, first, [entry % size for entry in entries])


class OwningForward(LeadingForward):
    """The forward pass of rank 0, which tells the others whose sequences a step has."""

    def __init__(self, part: Part, program: Any, kv_cache: NativeCache, *more: Any):
        self._pool_size = kv_cache.num_blocks
        super().__init__(program, kv_cache, *more)
        self._owned = array("i", [0] * part.size)
        self.kv_cache = LeadingCache(PoolOfRank(kv_cache, part), self._messages)

    def _make_tables(self, *sizes: int) -> PoolTables:
        return PoolTables(self._pool_size, *sizes)

    def exit_after(self, num_layers: int) -> LeadingForward:
        raise ConfigError(
            "enable_dp_attention: no exit after some layers: the first ones would draft for the "
            "sequences of all ranks; choose another drafter"
        )

    def _write_sequences(self, batch: Batch) -> tuple[int, int]:
        owned = self._owned
        for rank in range(len(owned)):
            owned[rank] = 0
        last = 0
        for item in batch.items:
            owner = item.request.block_ids[0] // self._pool_size
            assert owner >= last, "sequences of a rank are next to each other"
            owned[owner] += 1
            last = owner
        self._arguments.num_own_seqs = owned[0]  # the first ones
        return super()._write_sequences(batch)


class OwnedForward(FollowingForward):
    """The forward pass of another rank."""

    def __init__(self, part: Part, program: Any, kv_cache: NativeCache, *more: Any):
        super().__init__(program, kv_cache, *more)
        self._part = part
        self.kv_cache = PoolOfRank(kv_cache, part)

    def _take_owners(self, header: StepHeader, reader: Reader) -> None:
        if not header.flags & HAS_OWNERS:
            raise BadMessage("a step does not say whose its sequences are")
        counts = reader.take(self._part.size).tolist()
        if min(counts) < 0 or sum(counts) != header.num_seqs:
            raise BadMessage(f"{counts} sequences of ranks are not the {header.num_seqs} of a step")
        self._arguments.first_own_seq = sum(counts[: self._part.rank])
        self._arguments.num_own_seqs = counts[self._part.rank]
