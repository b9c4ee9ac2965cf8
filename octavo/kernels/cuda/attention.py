"""Causal attention over paged KV, in Triton: two kernels that read the cache by block tables.

A program has a tile of rows, the queries of some tokens for all heads that share a key head::

    row             0  1  2  3  4  5  ...  15      of a tile of 16, for groups of 3 heads
    token           0  0  0  1  1  1         5     the last row is none
    head of group   0  1  2  0  1  2

and goes through tiles of keys, which begin at multiples of their size. :func:`paged_attention` is
for steps with prompts: tiles of rows cover all tokens of the step, and each goes through all of its
keys. :func:`decode_attention` is for steps in which every sequence has a few tokens at most: there
are not enough tiles of rows to fill a GPU, so what a sequence has in its cache is split among
programs (Dao et al. 2023, "Flash-Decoding"), and the last of them to be ready puts it together.

Softmax is computed as it goes (Milakov & Gimelshein 2018, arXiv 1805.02867), in base 2: a *state*
of rows is the greatest score so far, and the sum of weights and of weighted values relative to it.

**Batch invariance.** With a fixed split, states begin anew at positions that are multiples of it
and are merged in order of position, in either kernel; tiles of rows have one size, and what is
masked adds exact zeros. Then a query's result depends on nothing but its own sequence.

No slot is read that no query of a tile sees. Queries are where the keys are: rotated if these are
(see ``kv_write.py``), and the codes of keys and values are multiplied as they are, their scales
with the scores and the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.kv_codes import code_values, kind_of, pointers
from octavo.kernels.cuda.ops import Scoring, StepTables
from octavo.kernels.kv_stores import KVStore

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work. ``rows`` and ``keys`` are powers of two, 16 at least."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """What :func:`decode_attention` keeps between its programs; shared by all layers of a step.

    Made once for a captured shape. The counters are zero between launches.
    """

    num_splits: int
    split_keys: int  # that a split has at most; 0: as a sequence's length wants it
    states: Tensor  # float32 [S, Hk, num_splits, rows, WIDTH + 2]
    counters: Tensor  # int32 [S, Hk]


def prefill_tiles(
    head_dim: int, value_bytes: int, group: int, arch: int, is_coded: bool = False
) -> Tiles:
    """For :func:`paged_attention`, the largest that spill no registers.

    ``value_bytes`` are those of a number of q, ``group`` heads share a key head, ``arch`` is the
    compute capability times ten; codes in the cache take registers to unpack.
    """
    row_bytes = triton.next_power_of_2(head_dim) * value_bytes
    if value_bytes > 2:  # no tensor cores
        tiles = Tiles(rows=16, keys=32 if row_bytes <= 512 else 16, num_warps=4, num_stages=2)
    else:
        is_narrow, is_new = row_bytes <= 256, arch >= 90
        tiles = Tiles(
            rows=(128 if is_narrow else 64) >> (is_coded and not is_new),
            keys=64 if is_narrow and is_new and not is_coded else 32,
            num_warps=8,
            num_stages=3 if is_narrow else 2,
        )
    return replace(tiles, rows=max(tiles.rows, triton.next_power_of_2(group)))


def decode_tiles(head_dim: int, value_bytes: int, num_rows: int) -> Tiles:
    """For :func:`decode_attention`: ``num_rows`` are a sequence's tokens times heads of a group."""
    row_bytes = triton.next_power_of_2(head_dim) * value_bytes
    rows = max(16, triton.next_power_of_2(num_rows))
    keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    # At five, two look up blocks, and two tiles of keys and values are on their way.
    return Tiles(rows, keys, num_warps=4, num_stages=2 if value_bytes > 2 else 5)


def split_scratch(
    num_seqs: int,
    num_kv_heads: int,
    head_dim: int,
    max_seq_len: int,
    tiles: Tiles,
    device: torch.device,
    num_processors: int,
    split_keys: int = 0,
) -> SplitScratch:
    """For steps of ``num_seqs`` sequences on a GPU of ``num_processors``, made before a capture.

    Two programs for each processor, unless that makes splits of less than four tiles; or with
    ``split_keys``, a multiple of the tiles' keys, as many splits as the longest sequence has.
    """
    if split_keys:
        assert split_keys % tiles.keys == 0
        num_splits = triton.cdiv(max_seq_len, split_keys)
    else:
        wanted = triton.cdiv(2 * num_processors, num_seqs * num_kv_heads)
        num_splits = max(1, min(wanted, max_seq_len // (4 * tiles.keys)))
    width = triton.next_power_of_2(head_dim)
    shape = (num_seqs, num_kv_heads, num_splits, tiles.rows, width + 2)
    return SplitScratch(
        num_splits,
        split_keys,
        torch.empty(shape if num_splits > 1 else (1,), device=device),
        torch.zeros(num_seqs, num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_attention(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    tiles: Tiles,
    split_keys: int = 0,
) -> None:
    """Attention of q [T, H, D] over the caches, to ``out`` [T, H, D] of the same type.

    Sequences may have any number of tokens. ``split_keys`` as those of the :class:`SplitScratch`
    that a batch-invariant decode has, with the same tiles.
    """
    group = q.shape[1] // k_cache.num_heads
    num_seqs = len(tables.seq_lens)
    # Of a sequence, the last tile of rows may be a part: so many there are at most.
    num_tiles = len(q) // (tiles.rows // group) + num_seqs
    _attend_rows[(num_tiles, k_cache.num_heads)](
        **_arguments(q, k_cache, v_cache, tables, scoring, out, tiles, split_keys),
        num_seqs=num_seqs,
    )


def decode_attention(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    tiles: Tiles,
    scratch: SplitScratch,
) -> None:
    """The same where no sequence has more tokens than a tile has rows for."""
    _attend_splits[(len(tables.seq_lens), k_cache.num_heads, scratch.num_splits)](
        **_arguments(q, k_cache, v_cache, tables, scoring, out, tiles, scratch.split_keys),
        states=scratch.states,
        counters=scratch.counters,
        NUM_SPLITS=scratch.num_splits,
    )


def _arguments(
    q: Tensor,
    k_cache: KVStore,
    v_cache: KVStore,
    tables: StepTables,
    scoring: Scoring,
    out: Tensor,
    tiles: Tiles,
    split_keys: int,
) -> dict[str, Any]:
    """Those that both kernels have."""
    head_dim, num_kv_heads = q.shape[-1], k_cache.num_heads
    group = q.shape[1] // num_kv_heads
    assert group <= tiles.rows
    softcap = scoring.softcap
    keys, key_scales = pointers(k_cache)
    values, value_scales = pointers(v_cache)
    return {
        "q": q,
        "keys": keys,
        "key_scales": key_scales,
        "values": values,
        "value_scales": value_scales,
        "block_tables": tables.block_tables,
        "table_width": tables.block_tables.shape[1],
        "query_start": tables.query_start,
        "seq_lens": tables.seq_lens,
        "sinks": scoring.sinks,
        "out": out,
        # Either way, what comes out is a score in units of base 2.
        "scale": scoring.scale * _LOG2_E if softcap is None else scoring.scale / softcap,
        "softcap": 0.0 if softcap is None else softcap * _LOG2_E,
        "num_kv_heads": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": k_cache.parts[0].shape[1],
        "WINDOW": scoring.window or 0,
        "HAS_SOFTCAP": softcap is not None,
        "KEY_KIND": kind_of(k_cache),
        "VALUE_KIND": kind_of(v_cache),
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "SPLIT_KEYS": split_keys,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
        # What is fused depends on what else is in a kernel.
        "enable_fp_fusion": not split_keys,
    }


# Compiled once for all batches.
@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def _attend_rows(
    q,
    keys,
    key_scales,
    values,
    value_scales,
    block_tables,
    table_width,
    query_start,
    seq_lens,
    sinks,
    out,
    scale,
    softcap,
    num_kv_heads,
    num_seqs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program for each tile of rows and key head."""
    TOKENS: tl.constexpr = ROWS // GROUP
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = _sequence_of(tile, query_start, num_seqs, TOKENS)
    start = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first_token = (tile - (start // TOKENS + seq)) * TOKENS
    if first_token >= count or length == 0:
        return
    last_token = tl.minimum(first_token + TOKENS, count) - 1

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (token <= last_token) & (row < TOKENS * GROUP)
    place = ((start + token) * num_kv_heads + head) * GROUP + row % GROUP
    query = _load_rows(q, place, is_row, HEAD_DIM, WIDTH)
    position = length - count + token
    first_seen = _first_seen(length - count + first_token, WINDOW)
    end = length - count + last_token + 1

    total, norm, top = _no_state(ROWS, WIDTH)
    SPAN: tl.constexpr = SPLIT_KEYS if SPLIT_KEYS else 1 << 30
    for split in tl.range(first_seen // SPAN, tl.cdiv(end, SPAN), num_stages=1):
        other_total, other_norm, other_top = _attend(
            query, position, keys, key_scales, values, value_scales,
            block_tables + seq.to(tl.int64) * table_width, head, num_kv_heads,
            first_seen, split * SPAN, tl.minimum(end, split * SPAN + SPAN), scale, softcap,
            HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, KEY_KIND, VALUE_KIND,
            ROWS, KEYS, STAGES,
        )  # fmt: skip
        total, norm, top = _merge(total, norm, top, other_total, other_norm, other_top)
    _store_rows(out, place, is_row, total, norm, top, sinks, head, GROUP, HEAD_DIM, WIDTH, ROWS)


@triton.jit(do_not_specialize=["table_width"])
def _attend_splits(
    q,
    keys,
    key_scales,
    values,
    value_scales,
    block_tables,
    table_width,
    query_start,
    seq_lens,
    sinks,
    out,
    scale,
    softcap,
    num_kv_heads,
    states,
    counters,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """A program for each sequence, key head and split, of which there may be more than are used."""
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first_seen = _first_seen(length - count, WINDOW)
    base = first_seen // KEYS * KEYS
    span = tl.cdiv(tl.cdiv(length - base, KEYS), NUM_SPLITS) * KEYS
    if SPLIT_KEYS:
        base = first_seen // SPLIT_KEYS * SPLIT_KEYS
        span = SPLIT_KEYS
    begin = base + split * span
    if begin >= length or count == 0:
        return

    row = tl.arange(0, ROWS)
    token = row // GROUP
    is_row = token < count
    place = ((start + token) * num_kv_heads + head) * GROUP + row % GROUP
    query = _load_rows(q, place, is_row, HEAD_DIM, WIDTH)
    total, norm, top = _attend(
        query, length - count + token, keys, key_scales, values, value_scales,
        block_tables + seq.to(tl.int64) * table_width, head, num_kv_heads,
        first_seen, begin, tl.minimum(begin + span, length), scale, softcap,
        HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, KEY_KIND, VALUE_KIND,
        ROWS, KEYS, STAGES,
    )  # fmt: skip

    num_used = tl.cdiv(length - base, span)
    if num_used > 1:
        item = seq * num_kv_heads + head
        of_item = states + item.to(tl.int64) * (NUM_SPLITS * ROWS * (WIDTH + 2))
        _save(of_item + split * (ROWS * (WIDTH + 2)), total, norm, top, WIDTH, ROWS)
        # All threads have saved their part before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(counters + item, 1, sem="acq_rel", scope="gpu") < num_used - 1:
            return
        tl.store(counters + item, 0)
        total, norm, top = _no_state(ROWS, WIDTH)
        for other in tl.range(0, num_used, num_stages=1):
            other_total, other_norm, other_top = _saved(
                of_item + other * (ROWS * (WIDTH + 2)), WIDTH, ROWS
            )
            total, norm, top = _merge(total, norm, top, other_total, other_norm, other_top)
    _store_rows(out, place, is_row, total, norm, top, sinks, head, GROUP, HEAD_DIM, WIDTH, ROWS)


@triton.jit
def _attend(
    query,
    query_position,
    keys,
    key_scales,
    values,
    value_scales,
    table,
    head,
    num_kv_heads,
    first_seen,
    begin,
    end,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state after positions ``begin``, a multiple of KEYS, to ``end``; what is before
    ``first_seen`` no row sees."""
    total, norm, top = _no_state(ROWS, WIDTH)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < HEAD_DIM
    first = tl.maximum(begin, first_seen // KEYS * KEYS)
    for tile in tl.range(first, end, KEYS, num_stages=STAGES):
        position = tile + tl.arange(0, KEYS)
        is_seen = (position >= first_seen) & (position < end)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        vector = slot * num_kv_heads + head

        at = vector[None, :] * HEAD_DIM + dim[:, None]
        key = tl.load(keys + at, mask=is_seen[None, :] & is_dim[:, None], other=0)
        key = code_values(key, query.dtype, KEY_KIND)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if KEY_KIND != "float":
            score *= tl.load(key_scales + vector, mask=is_seen, other=0.0)[None, :]
        if HAS_SOFTCAP:
            score = softcap * (1 - 2 / (tl.exp(2 * score) + 1))  # tanh
        is_visible = is_seen[None, :] & (position[None, :] <= query_position[:, None])
        if WINDOW:
            is_visible &= position[None, :] > query_position[:, None] - WINDOW
        score = tl.where(is_visible, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        base = _finite(new_top)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        norm = norm * shrink + tl.sum(weight, axis=1)
        at = vector[:, None] * HEAD_DIM + dim[None, :]
        value = tl.load(values + at, mask=is_seen[:, None] & is_dim[None, :], other=0)
        if VALUE_KIND != "float":
            weight *= tl.load(value_scales + vector, mask=is_seen, other=0.0)[None, :]
        value = code_values(value, query.dtype, VALUE_KIND)
        total *= shrink[:, None]
        total = tl.dot(weight.to(query.dtype), value, total, input_precision="ieee")
        top = new_top
    return total, norm, top


@triton.jit
def _no_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32), top


@triton.jit
def _merge(total, norm, top, other_total, other_norm, other_top):
    """Of two states, one. One of no keys changes no bit of the other."""
    new_top = tl.maximum(top, other_top)
    base = _finite(new_top)
    own, others = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * own[:, None] + other_total * others[:, None]
    return total, norm * own + other_norm * others, new_top


@triton.jit
def _finite(top):
    """So that a row that has seen nothing yet has weights of 0, and none that are no numbers."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _save(state, total, norm, top, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    tl.store(state + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], total)
    tl.store(state + ROWS * WIDTH + row, norm)
    tl.store(state + ROWS * (WIDTH + 1) + row, top)


@triton.jit
def _saved(state, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """By other programs: not to be taken from what this one's processor may have cached."""
    row = tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.load(state + at, cache_modifier=".cg")
    norm = tl.load(state + ROWS * WIDTH + row, cache_modifier=".cg")
    return total, norm, tl.load(state + ROWS * (WIDTH + 1) + row, cache_modifier=".cg")


@triton.jit
def _sequence_of(tile, query_start, num_seqs, TOKENS: tl.constexpr):
    """The last sequence whose tiles of rows begin at ``tile`` or before, by bisection.

    Those of sequence s begin at tile query_start[s] // TOKENS + s: tiles may be left over between
    sequences, and are none of the next one.
    """
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(query_start + middle) // TOKENS + middle > tile
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at ``position`` sees."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    return 0


@triton.jit
def _load_rows(x, place, is_row, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)
    at = place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    return tl.load(x + at, mask=is_row[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(
    out,
    place,
    is_row,
    total,
    norm,
    top,
    sinks,
    head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A sink takes its part of the weight, and has no value."""
    if sinks is not None:
        row = tl.arange(0, ROWS)
        sink = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * 1.4426950408889634
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        total *= shrink[:, None]
        norm = norm * shrink + tl.exp2(sink - base)
    norm = tl.where(is_row, norm, 1.0)
    dim = tl.arange(0, WIDTH)
    at = place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    mean = (total / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, mean, mask=is_row[:, None] & (dim < HEAD_DIM)[None, :])
