"""Plans how attention over the paged KV cache is cut into GPU programs, and their memory.

Nothing here launches anything, or needs Triton. A :class:`Cut` depends only on the shape of a step,
never on its contents, so a captured step serves every batch of its shape::

    a few tokens of each sequence   their keys are split among programs: as many as keep the GPU
                                    busy, if sequences alone do not
    any tokens                      tiles of rows, each of which goes through all of its keys; but
                                    sequences of a few tokens, beside a prompt, as above

**Batch invariance.** The last bits of a sum depend on how it is split; so for results that are the
same in any batch, splits and tiles are fixed: see :func:`invariant_tiles` for the cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.kv_stores import FloatCodec, KVStore

# Programs for each multiprocessor, if sequences are split, and the least tiles of keys of each.
_PROGRAMS_EACH = 2
_LEAST_TILES = 4
_LEAST_ROWS = 16  # of a tile
# Maximal bytes of a tile of rows of split sequences: larger states do not fit.
_MAX_SPLIT_TILE = 16 << 10
# Keys of a batch-invariant split, and the maximal splits for each multiprocessor.
INVARIANT_SPLIT = 512
_MAX_INVARIANT_EACH = 32

# Numbers of a row's state besides its values: two, and two for 16-byte alignment.
STATE_EXTRA = 4


@dataclass(frozen=True, slots=True)
class StepTables:
    """Places of the tokens of a step, on the device, in tensors of the captured size.

    Sequence s has the rows query_start[s] to query_start[s + 1] of the step, which are the last of
    its seq_lens[s] slots. A padding sequence has length 0.
    """

    block_tables: Tensor  # int32 [S, longest table]
    query_start: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scale, window, softcap and sinks, as in :func:`octavo.kernels.attention.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a layer that its tiles depend on. Values may be narrower than keys."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    number_bytes: int  # bytes of a number of q
    is_coded: bool = False  # the cache has codes, which take registers to unpack
    is_latent: bool = False  # keys are values too; their heads are tiles of those of queries

    @classmethod
    def of(cls, q: Tensor, k_cache: KVStore, v_cache: KVStore) -> HeadShape:
        """The shape for q [T, H, D] and the caches of a layer."""
        _, num_heads, key_dim = q.shape
        return cls(
            num_heads,
            k_cache.num_heads,
            key_dim,
            v_cache.parts[0].shape[-1],
            q.element_size(),
            _is_coded(k_cache, v_cache),
        )

    @classmethod
    def of_latents(cls, q: Tensor, latents: KVStore, rope_keys: KVStore) -> HeadShape:
        """The shape for q [T, H, C] and the caches of a layer of latent attention."""
        _, num_heads, width = q.shape
        tile = max(size for size in range(1, _LEAST_ROWS + 1) if num_heads % size == 0)
        is_coded = _is_coded(latents, rope_keys)
        return cls(num_heads, num_heads // tile, width, width, q.element_size(), is_coded, True)

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a key in a tile, where its numbers are padded to a power of two."""
        return power_of_two(max(self.key_dim, self.value_dim)) * self.number_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU that decide how work is cut."""

    arch: int  # its compute capability, times ten
    num_processors: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        found = torch.cuda.get_device_properties(device)
        return cls(10 * found.major + found.minor, found.multi_processor_count)

    @property
    def has_large_tiles(self) -> bool:
        """True for tensor cores that take operands from shared memory, of which a block has 227
        KiB: sm_90 and sm_100, but not the smaller GPUs that came after them."""
        return 90 <= self.arch < 120


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tile sizes of a kernel. ``rows`` and ``keys`` are powers of two, 16 at least."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of a launch into programs.

    Args:
        num_splits: programs for each sequence and key head; 0 for tiles of rows.
        split_keys: keys of each split, at whose multiples states begin anew; 0 for an even
            division.
        saved_rows: maximal rows of a sequence; the launch leaves longer ones alone.
        few: a further launch, for the sequences that it has rows for; this one leaves them alone.
    """

    tiles: AttentionTiles
    num_splits: int = 0
    split_keys: int = 0
    saved_rows: int = 0
    few: Cut | None = None


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """Limits of steps whose sequences are split."""

    max_num_seqs: int
    max_query: int  # tokens of a sequence: one, and the longest chain of drafts
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ScratchSize:
    """Size of the memory that programs of one sequence share, in numbers of 4 bytes."""

    num_floats: int
    num_counters: int

    @property
    def num_bytes(self) -> int:
        return 4 * (self.num_floats + self.num_counters)


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """Division of a step into programs, for each head shape."""

    cuts: Mapping[HeadShape, Cut]


class AttentionPlanner:
    """Cuts the steps of one model on one GPU."""

    def __init__(
        self,
        kinds: Collection[HeadShape],
        limits: AttentionLimits,
        gpu: Gpu,
        is_invariant: bool = False,
    ):
        self._kinds = frozenset(kinds)
        self._plans: dict[tuple[int, int, int], GpuAttentionPlan] = {}
        self._limits, self._gpu, self._is_invariant = limits, gpu, is_invariant

    def plan(self, num_seqs: int, max_query: int, longest: int | None = None) -> GpuAttentionPlan:
        """Plan steps of ``num_seqs`` sequences with at most ``max_query`` tokens each.

        Sequences have at most ``longest`` slots; by default, as many as the limits allow.
        """
        longest = longest or self._limits.max_seq_len
        of_step = num_seqs, max_query, longest
        if of_step not in self._plans:
            self._plans[of_step] = self._plan(*of_step)
        return self._plans[of_step]

    def _plan(self, num_seqs: int, max_query: int, longest: int) -> GpuAttentionPlan:
        limits = self._limits
        if num_seqs > limits.max_num_seqs:
            make = self._cut_rows
        else:
            make = self._cut_keys if max_query <= limits.max_query else self._cut_both
        return GpuAttentionPlan(
            {heads: make(heads, num_seqs, max_query, longest) for heads in self._kinds}
        )

    @property
    def scratch(self) -> ScratchSize:
        """Memory that is enough for any step."""
        limits = self._limits
        sizes = [
            scratch_size(cut, heads, num_seqs)
            for num_seqs in range(1, limits.max_num_seqs + 1)
            for max_query in range(1, limits.max_query + 1)
            for heads, cut in self.plan(num_seqs, max_query).cuts.items()
        ]
        return ScratchSize(
            max(size.num_floats for size in sizes), max(size.num_counters for size in sizes)
        )

    def _cut_rows(self, heads: HeadShape, num_seqs: int, max_query: int, longest: int) -> Cut:
        """Cut by tiles of rows."""
        if self._is_invariant:
            return Cut(invariant_tiles(heads), split_keys=INVARIANT_SPLIT)
        return Cut(prefill_tiles(heads, self._gpu))

    def _cut_both(self, heads: HeadShape, num_seqs: int, max_query: int, longest: int) -> Cut:
        """Cut by rows; but sequences whose tokens fit the smallest tile by splits, if there are
        several: one that continues a long context would be a program that all others wait for."""
        by_rows = self._cut_rows(heads, num_seqs, max_query, longest)
        num_tokens = min(max(1, _LEAST_ROWS // heads.group), self._limits.max_query)
        few = self._cut_keys(heads, num_seqs, num_tokens, longest)
        is_worth_it = num_seqs > 1 and few.num_splits > 1
        return replace(by_rows, few=few) if is_worth_it else by_rows

    def _cut_keys(self, heads: HeadShape, num_seqs: int, max_query: int, longest: int) -> Cut:
        """Use two programs for each multiprocessor, unless that makes splits of less than four
        tiles.

        Fixed splits are as many as the longest sequence has, unless the longest possible one has
        too many.
        """
        num_rows = heads.group * max_query
        num_items = num_seqs * heads.num_kv_heads
        if self._is_invariant:
            tiles = invariant_tiles(heads)
            num_splits, keys = -(-longest // INVARIANT_SPLIT), INVARIANT_SPLIT
            most_splits = -(-self._limits.max_seq_len // INVARIANT_SPLIT)
            most = _MAX_INVARIANT_EACH * self._gpu.num_processors
            is_worth_it = num_rows <= tiles.rows and num_items * most_splits <= most
        else:
            tiles = decode_tiles(heads, num_rows)
            wanted = -(-_PROGRAMS_EACH * self._gpu.num_processors // num_items)
            num_splits, keys = max(1, min(wanted, longest // (_LEAST_TILES * tiles.keys))), 0
            is_worth_it = tiles.rows * heads.row_bytes <= _MAX_SPLIT_TILE
        if not is_worth_it:
            return self._cut_rows(heads, num_seqs, max_query, longest)
        return Cut(tiles, num_splits, keys, num_rows)


def _is_coded(*caches: KVStore) -> bool:
    return not all(isinstance(cache.codec, FloatCodec) for cache in caches)


def scratch_size(cut: Cut, heads: HeadShape, num_seqs: int) -> ScratchSize:
    if cut.num_splits <= 1:
        return ScratchSize(0, 0)
    num_items = num_seqs * heads.num_kv_heads
    state = cut.saved_rows * (power_of_two(heads.value_dim) + STATE_EXTRA)
    return ScratchSize(num_items * cut.num_splits * state, num_items)


def prefill_tiles(heads: HeadShape, gpu: Gpu) -> AttentionTiles:
    """The largest tiles of rows that spill no registers."""
    if heads.is_latent:
        return _latent_tiles(heads, 32)  # 64 rows spill registers on compute 9.0
    if heads.number_bytes > 2:  # no tensor cores
        tiles = AttentionTiles(
            rows=16, keys=32 if heads.row_bytes <= 512 else 16, num_warps=4, num_stages=2
        )
    else:
        is_narrow, is_large = heads.row_bytes <= 256, gpu.has_large_tiles
        tiles = AttentionTiles(
            rows=(128 if is_narrow else 64) >> (heads.is_coded and not is_large),
            keys=64 if is_narrow and is_large and not heads.is_coded else 32,
            num_warps=8,
            num_stages=3 if is_narrow else 2,
        )
    return replace(tiles, rows=max(tiles.rows, power_of_two(heads.group)))


def decode_tiles(heads: HeadShape, num_rows: int) -> AttentionTiles:
    """Tiles of splits: ``num_rows`` are a sequence's tokens times heads of a group."""
    rows = max(_LEAST_ROWS, power_of_two(num_rows))
    if heads.is_latent:
        return _latent_tiles(heads, rows)
    if heads.number_bytes > 2:
        return AttentionTiles(
            rows, keys=32 if heads.row_bytes <= 512 else 16, num_warps=4, num_stages=2
        )
    # With five stages, two look up blocks, and two tiles of keys and values are in flight.
    if rows * heads.row_bytes > _MAX_SPLIT_TILE >> (2 if heads.is_coded else 1):
        return AttentionTiles(rows, keys=32, num_warps=8, num_stages=5)
    return AttentionTiles(
        rows, keys=64 if heads.row_bytes <= 256 else 32, num_warps=4, num_stages=5
    )


def _latent_tiles(heads: HeadShape, rows: int) -> AttentionTiles:
    """Tiles of latent attention: rows have more values than those of any head, and all heads read
    the same keys."""
    if heads.number_bytes > 2:
        return AttentionTiles(rows, keys=16, num_warps=4, num_stages=2)
    return AttentionTiles(rows, keys=32, num_warps=8, num_stages=2 if rows > _LEAST_ROWS else 4)


def invariant_tiles(heads: HeadShape) -> AttentionTiles:
    """Tiles that are the same for prompts and single tokens, so that both give the same bits.

    Prompts take smaller tiles than they would otherwise, and read keys more often; a single token
    computes unused rows while it waits for memory.
    """
    if heads.number_bytes > 2 or heads.is_latent:
        return decode_tiles(heads, heads.group)
    rows = 64 if heads.row_bytes <= 256 else 32
    return AttentionTiles(max(rows, power_of_two(heads.group)), keys=32, num_warps=8, num_stages=3)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()
