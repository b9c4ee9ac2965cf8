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
    AttentionPlan,
    AttentionPlanner,
    Cut,
    Gpu,
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

    def plan(self, num_seqs: int, max_query: int, longest: int | None = None) -> AttentionPlan:
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
        plan: AttentionPlan,
    ) -> None:
        """Of q [T, H, D] over the caches of a layer, to ``out`` [T, H, DV] of the same type."""
        cut = plan.cuts[HeadShape.of(q, k_cache, v_cache)]
        by_splits = cut if cut.num_splits else cut.few
        if not cut.num_splits:
            attend_by_rows(q, k_cache, v_cache, tables, scoring, out, cut)
        if by_splits is not None:
            attend_by_splits(q, k_cache, v_cache, tables, scoring, out, by_splits, self._scratch)


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
    group, num_seqs = q.shape[1] // k_cache.num_heads, len(tables.seq_lens)
    most_of_others = 0 if cut.few is None else cut.few.saved_rows // group
    # Of a sequence, the last tile of rows may be a part: so many there are at most.
    num_tiles = len(q) // (cut.tiles.rows // group) + num_seqs
    attend_rows[(num_tiles, k_cache.num_heads)](
        **_arguments(q, k_cache, v_cache, tables, scoring, out, cut),
        num_seqs=num_seqs,
        most_of_others=most_of_others,
    )


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
    num_seqs = len(tables.seq_lens)
    assert scratch.holds(scratch_size(cut, HeadShape.of(q, k_cache, v_cache), num_seqs))
    attend_splits[(num_seqs, k_cache.num_heads, cut.num_splits)](
        **_arguments(q, k_cache, v_cache, tables, scoring, out, cut),
        states=scratch.states,
        counters=scratch.counters,
        num_splits=cut.num_splits,
        saved_rows=cut.saved_rows,
    )


def _arguments(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    cut: Cut,
) -> dict[str, Any]:
    """Those that both kernels have."""
    num_kv_heads, softcap = k_cache.num_heads, scoring.softcap
    group = q.shape[1] // num_kv_heads
    assert group <= cut.tiles.rows
    keys, key_scales = pointers(k_cache)
    values, value_scales = pointers(v_cache)
    return {
        "q": q,
        "keys": keys,
        "key_scales": key_scales,
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
        "num_kv_heads": num_kv_heads,
        "GROUP": group,
        "KEY_DIM": q.shape[-1],
        "KEY_WIDTH": power_of_two(q.shape[-1]),
        "VALUE_DIM": out.shape[-1],
        "VALUE_WIDTH": power_of_two(out.shape[-1]),
        "VALUE_STRIDE": values.stride(-2),
        "BLOCK_SIZE": keys.shape[1],
        "WINDOW": scoring.window or 0,
        "HAS_SOFTCAP": softcap is not None,
        "KEY_KIND": kind_of(k_cache),
        "VALUE_KIND": kind_of(v_cache),
        "ROWS": cut.tiles.rows,
        "KEYS": cut.tiles.keys,
        "SPLIT_KEYS": cut.split_keys,
        "STAGES": cut.tiles.num_stages,
        "num_warps": cut.tiles.num_warps,
        # What is fused depends on what else is in a kernel.
        "enable_fp_fusion": not cut.split_keys,
    }
