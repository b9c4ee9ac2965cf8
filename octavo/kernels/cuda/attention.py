"""Causal attention over the paged KV cache on a GPU, in Triton.

There are two kernels. One is for prompts: tiles of rows cover all tokens of the step, and each goes
through all of its keys. The other is for sequences of a few tokens, which have not enough tiles of
rows to fill a GPU: the cached keys of a sequence are split among programs (Dao et al. 2023,
"Flash-Decoding"), and the last program to finish merges the results. ``attention_plan.py`` decides
between them, or for both, and how work is cut.

Queries are rotated as the cached keys are (see ``kv_write.py``). Codes of keys and values are
multiplied as they are, their scales with the scores and the weights. Values may be narrower than
keys, and a prefix of them (as latents are).
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
from octavo.kernels.cuda.ops import AttentionLayer, LatentLayer
from octavo.kernels.kv_stores import KVStore

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Memory in which programs that share a sequence leave their results to the last of them.

    Consecutive launches can share it: all counters are zero between them.
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
    """Attention of one model on one GPU: plans steps, and owns the memory of their splits.

    All layers and all captured steps share that memory, since they run one after the other in a
    stream. ``kinds`` are the head shapes of the model's layers; with ``is_invariant``, a query's
    result has the same bits in any batch.
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
        """Reset the counters, after a step of which some launches may be missing."""
        self._scratch.counters.zero_()

    def plan(self, num_seqs: int, max_query: int, longest: int | None = None) -> GpuAttentionPlan:
        """Plan a step for all layers, as :meth:`AttentionPlanner.plan`."""
        return self._planner.plan(num_seqs, max_query, longest)

    def attend(
        self,
        q: Tensor,
        layer: AttentionLayer,
        tables: StepTables,
        out: Tensor,
        plan: GpuAttentionPlan,
    ) -> None:
        """Attention of q [T, H, D] over the caches of a layer, to out [T, H, DV] of the type of
        q."""
        inputs = AttentionInputs.of_heads(q, layer.k_cache, layer.v_cache)
        self._attend(inputs, tables, layer.scoring, out, plan.cuts[inputs.heads])

    def attend_latents(
        self,
        q: Tensor,
        rope_q: Tensor,
        layer: LatentLayer,
        tables: StepTables,
        out: Tensor,
        plan: GpuAttentionPlan,
    ) -> None:
        """Attention of absorbed queries q [T, H, C], with rope_q [T, H, R] beside them, over latent
        vectors and their rotated keys, to out [T, H, C], which may be q itself."""
        inputs = AttentionInputs.of_latents(q, rope_q, layer.latents, layer.rope_keys)
        self._attend(inputs, tables, Scoring(layer.scale), out, plan.cuts[inputs.heads])

    def _attend(
        self, inputs: AttentionInputs, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut
    ) -> None:
        by_splits = cut if cut.num_splits else cut.few
        if not cut.num_splits:
            attend_by_rows(inputs, tables, scoring, out, cut)
        if by_splits is not None:
            attend_by_splits(inputs, tables, scoring, out, by_splits, self._scratch)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of a launch: queries, and the caches of a layer. For latent attention, ``keys`` are
    the latent vectors, ``values`` the rotated keys beside them, and ``rope_q`` the queries for
    these."""

    q: Tensor
    keys: KVStore
    values: KVStore
    heads: HeadShape
    rope_q: Tensor | None = None

    @classmethod
    def of_heads(cls, q: Tensor, keys: KVStore, values: KVStore) -> AttentionInputs:
        return cls(q, keys, values, HeadShape.of(q, keys, values))

    @classmethod
    def of_latents(
        cls, q: Tensor, rope_q: Tensor, latents: KVStore, rope_keys: KVStore
    ) -> AttentionInputs:
        heads = HeadShape.of_latents(q, latents, rope_keys)
        return cls(q, latents, rope_keys, heads, rope_q)


def attend_by_rows(
    inputs: AttentionInputs, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut
) -> None:
    """Attend sequences of any number of tokens, except those that ``cut.few`` has rows for."""
    group, num_seqs = inputs.heads.group, len(tables.seq_lens)
    most_of_others = 0 if cut.few is None else cut.few.saved_rows // group
    # The last tile of a sequence may be partial, so this is the maximum.
    num_tiles = len(inputs.q) // (cut.tiles.rows // group) + num_seqs
    attend_rows[(num_tiles, inputs.heads.num_kv_heads)](
        **_arguments(inputs, tables, scoring, out, cut),
        num_seqs=num_seqs,
        most_of_others=most_of_others,
    )


def attend_by_splits(
    inputs: AttentionInputs,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    cut: Cut,
    scratch: SplitScratch,
) -> None:
    """Attend sequences of no more rows than ``cut.saved_rows``; others are left alone."""
    num_seqs = len(tables.seq_lens)
    assert scratch.holds(scratch_size(cut, inputs.heads, num_seqs))
    attend_splits[(num_seqs, inputs.heads.num_kv_heads, cut.num_splits)](
        **_arguments(inputs, tables, scoring, out, cut),
        states=scratch.states,
        counters=scratch.counters,
        num_splits=cut.num_splits,
        saved_rows=cut.saved_rows,
    )


def _arguments(
    inputs: AttentionInputs, tables: StepTables, scoring: Scoring, out: Tensor, cut: Cut
) -> dict[str, Any]:
    """Arguments that both kernels have."""
    heads, softcap, q = inputs.heads, scoring.softcap, inputs.q
    assert heads.group <= cut.tiles.rows
    keys, key_scales = pointers(inputs.keys)
    values, value_scales = pointers(inputs.values)
    rope_keys: tuple[Tensor | None, Tensor | None] = (None, None)
    if heads.is_latent:
        rope_keys, (values, value_scales) = (values, value_scales), (keys, key_scales)
    return {
        "q": q,
        "rope_q": inputs.rope_q,
        "keys": keys,
        "key_scales": key_scales,
        "rope_keys": rope_keys[0],
        "rope_scales": rope_keys[1],
        "values": values,
        "value_scales": value_scales,
        "block_tables": tables.block_tables,
        "table_stride": tables.block_tables.stride(0),
        "query_start": tables.query_start,
        "seq_lens": tables.seq_lens,
        "sinks": scoring.sinks,
        "out": out,
        # Either way, scores are exponents of base 2.
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
        "KEY_KIND": kind_of(inputs.keys),
        "VALUE_KIND": kind_of(inputs.values),
        "ROWS": cut.tiles.rows,
        "KEYS": cut.tiles.keys,
        "SPLIT_KEYS": cut.split_keys,
        "STAGES": cut.tiles.num_stages,
        "ROPE_DIM": 0 if inputs.rope_q is None else inputs.rope_q.shape[-1],
        "num_warps": cut.tiles.num_warps,
        # The compiler's choice of fused operations differs between kernels.
        "enable_fp_fusion": not cut.split_keys,
    }
