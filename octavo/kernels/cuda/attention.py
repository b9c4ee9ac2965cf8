"""Causal attention over paged KV on a GPU, in Triton: two kernels that read the cache by tables.

One is for prompts: tiles of rows cover all tokens of the step, and each goes through all of its
keys. The other is for sequences that have a few tokens at most: there are not enough tiles of rows
to fill a GPU, so what a sequence has in its cache is split among programs (Dao et al. 2023,
"Flash-Decoding"), and the last of them to be ready puts it together. Which one it is, or both, and
how it is cut, is said in ``attention_plan.py``.

Queries are where the keys are: rotated if these are (see ``kv_write.py``), and the codes of keys
and values are multiplied as they are, their scales with the scores and the weights. Values may be
narrower than keys, and a prefix of them (as of latents that are both).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cuda.attention_kernels import attend_rows, attend_splits
from octavo.kernels.cuda.attention_plan import (
    AttentionLimits,
    AttentionPlanner,
    Cut,
    Gpu,
    GpuAttentionPlan,
    HeadShape,
    Scoring,
    ScratchSize,
    StepTables,
    power_of_two,
    scratch_size,
)
from octavo.kernels.cuda.kv_codes import kind_of, pointers
from octavo.kernels.kv_stores import KVStore

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """What programs that share a sequence leave to the last of them.

    Launches that come one after the other can share it: all counters are zero between them.
    """

    states: Tensor  # float32
    counters: Tensor  # int32

    @classmethod
    def of(cls, size: ScratchSize, device: torch.device) -> SplitScratch:
        return cls(
            torch.empty(size.num_floats, device=device),
            torch.zeros(size.num_counters, dtype=torch.int32, device=device),
        )

    def holds(self, size: ScratchSize) -> bool:
        has = ScratchSize(self.states.numel(), self.counters.numel())
        return has.num_floats >= size.num_floats and has.num_counters >= size.num_counters


class GpuAttention:
    """Attention of one model on one GPU: cuts steps ahead, and has the memory of their splits.

    That is one for all layers and all captured steps, which run one after the other in a stream.
    ``kinds`` are those of the model's layers; with ``is_invariant``, a query's result has the same
    bits in any company.
    """

    def __init__(
        self,
        kinds: Collection[HeadShape],
        limits: AttentionLimits,
        gpu: Gpu,
        device: torch.device,
        is_invariant: bool = False,
    ):
        self._planner = AttentionPlanner(kinds, limits, gpu, is_invariant)
        self._scratch = SplitScratch.of(self._planner.scratch, device)

    def reset(self) -> None:
        """Count from 0 again, after launches of which some may be missing."""
        self._scratch.counters.zero_()

    def plan(self, num_seqs: int, max_query: int, longest: int | None = None) -> GpuAttentionPlan:
        """As :meth:`AttentionPlanner.plan`: what :meth:`attend` needs, for all layers of a step."""
        return self._planner.plan(num_seqs, max_query, longest)

    def attend(
        self,
        q: Tensor,
        k_cache: KVStore,
        v_cache: KVStore,
        tables: StepTables,
        scoring: Scoring,
        out: Tensor,
        plan: GpuAttentionPlan,
    ) -> None:
        """Of q [T, H, D] over the caches of a layer, to ``out`` [T, H, DV] of the same type."""
        cut = plan.cuts[HeadShape.of(q, k_cache, v_cache)]
        self._attend(_Read.of_heads(q, k_cache, v_cache), tables, scoring, out, cut)

    def attend_latents(
        self,
        q: Tensor,
        turned_q: Tensor,
        latents: KVStore,
        turned: KVStore,
        tables: StepTables,
        scale: float,
        out: Tensor,
        plan: GpuAttentionPlan,
    ) -> None:
        """Of q [T, H, C], and turned_q [T, H, R] beside it, over latents and the keys beside them:
        to ``out`` [T, H, C], which may be where q is."""
        cut = plan.cuts[HeadShape.of_latents(q, latents, turned)]
        read = _Read.of_latents(q, turned_q, latents, turned)
        self._attend(read, tables, Scoring(scale), out, cut)

    def _attend(
        self, read: _Read, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut
    ) -> None:
        by_splits = cut if cut.num_splits else cut.few
        if not cut.num_splits:
            _by_rows(read, tables, scoring, out, cut)
        if by_splits is not None:
            _by_splits(read, tables, scoring, out, by_splits, self._scratch)


def attend_by_rows(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    cut: Cut,
) -> None:
    """For sequences of any number of tokens, but those that ``cut.few`` has rows for."""
    _by_rows(_Read.of_heads(q, k_cache, v_cache), tables, scoring, out, cut)


def attend_by_splits(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    cut: Cut,
    scratch: SplitScratch,
) -> None:
    """For sequences of as many tokens at most as ``cut.saved_rows`` are; others are left alone."""
    _by_splits(_Read.of_heads(q, k_cache, v_cache), tables, scoring, out, cut, scratch)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a launch reads: queries, and the caches of a layer. Of latents, ``values`` are those of
    the keys beside them, and so are queries."""

    q: Tensor
    keys: KVStore
    values: KVStore
    heads: HeadShape
    turned_q: Tensor | None = None

    @classmethod
    def of_heads(cls, q: Tensor, keys: KVStore, values: KVStore) -> _Read:
        return cls(q, keys, values, HeadShape.of(q, keys, values))

    @classmethod
    def of_latents(cls, q: Tensor, turned_q: Tensor, latents: KVStore, turned: KVStore) -> _Read:
        heads = HeadShape.of_latents(q, latents, turned)
        return cls(q, latents, turned, heads, turned_q)


def _by_rows(read: _Read, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut) -> None:
    group, num_seqs = read.heads.group, len(tables.seq_lens)
    most_of_others = 0 if cut.few is None else cut.few.saved_rows // group
    # Of a sequence, the last tile of rows may be a part: so many there are at most.
    num_tiles = len(read.q) // (cut.tiles.rows // group) + num_seqs
    attend_rows[(num_tiles, read.heads.num_kv_heads)](
        **_arguments(read, tables, scoring, out, cut),
        num_seqs=num_seqs,
        most_of_others=most_of_others,
    )


def _by_splits(
    read: _Read,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    cut: Cut,
    scratch: SplitScratch,
) -> None:
    num_seqs = len(tables.seq_lens)
    assert scratch.holds(scratch_size(cut, read.heads, num_seqs))
    attend_splits[(num_seqs, read.heads.num_kv_heads, cut.num_splits)](
        **_arguments(read, tables, scoring, out, cut),
        states=scratch.states,
        counters=scratch.counters,
        num_splits=cut.num_splits,
        saved_rows=cut.saved_rows,
    )


def _arguments(
    read: _Read, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut
) -> dict[str, Any]:
    """Those that both kernels have."""
    heads, softcap, q = read.heads, scoring.softcap, read.q
    assert heads.group <= cut.tiles.rows
    keys, key_scales = pointers(read.keys)
    values, value_scales = pointers(read.values)
    turned: tuple[Tensor | None, Tensor | None] = (None, None)
    if heads.is_latent:
        turned, (values, value_scales) = (values, value_scales), (keys, key_scales)
    return {
        "q": q,
        "turned_q": read.turned_q,
        "keys": keys,
        "key_scales": key_scales,
        "turned_keys": turned[0],
        "turned_scales": turned[1],
        "values": values,
        "value_scales": value_scales,
        "block_tables": tables.block_tables,
        "table_stride": tables.block_tables.stride(0),
        "query_start": tables.query_start,
        "seq_lens": tables.seq_lens,
        "sinks": scoring.sinks,
        "out": out,
        # Either way, what comes out is a score in units of base 2.
        "scale": scoring.scale * _LOG2_E if softcap is None else scoring.scale / softcap,
        "softcap": 0.0 if softcap is None else softcap * _LOG2_E,
        "num_kv_heads": heads.num_kv_heads,
        "GROUP": heads.group,
        "KEY_DIM": q.shape[-1],
        "KEY_WIDTH": power_of_two(q.shape[-1]),
        "VALUE_DIM": out.shape[-1],
        "VALUE_WIDTH": power_of_two(out.shape[-1]),
        "VALUE_STRIDE": values.stride(-2),
        "BLOCK_SIZE": keys.shape[1],
        "WINDOW": scoring.window or 0,
        "HAS_SOFTCAP": softcap is not None,
        "KEY_KIND": kind_of(read.keys),
        "VALUE_KIND": kind_of(read.values),
        "ROWS": cut.tiles.rows,
        "KEYS": cut.tiles.keys,
        "SPLIT_KEYS": cut.split_keys,
        "STAGES": cut.tiles.num_stages,
        "TURNED": 0 if read.turned_q is None else read.turned_q.shape[-1],
        "num_warps": cut.tiles.num_warps,
        # What is fused depends on what else is in a kernel.
        "enable_fp_fusion": not cut.split_keys,
    }
