"""The attention kernels behind ``attention.py``, in Triton.

A program has a tile of rows, the queries of some tokens for all heads that share a key head::

    row             0  1  2  3  4  5  ...  15      of a tile of 16, for groups of 3 heads
    token           0  0  0  1  1  1         5     the last row is unused
    head of group   0  1  2  0  1  2

and goes through tiles of keys, which begin at multiples of their size. Softmax is computed online
(Milakov & Gimelshein 2018, arXiv 1805.02867), in base 2: a *state* of rows is the greatest score so
far, and the sum of weights and of weighted values relative to it.

With fixed splits, states begin anew at positions that are multiples of one and are merged in order
of position, in either kernel; tiles of rows have one size, and masked keys add exact zeros. Then a
query's result depends on its own sequence alone.

Slots that no query of a tile sees are never read.

Latent vectors are keys and values at once, for all heads, with a rotated key of ROPE_DIM values
beside them: then the key heads of programs are tiles of heads that all read the same vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.cuda.attention_plan import STATE_EXTRA as _STATE_EXTRA
from octavo.kernels.cuda.kv_codes import code_values

STATE_EXTRA = tl.constexpr(_STATE_EXTRA)


# These arguments do not specialize, so that it is compiled once for all batches.
@triton.jit(do_not_specialize=["table_stride", "num_seqs", "most_of_others"])
def attend_rows(
    q,
    rope_q,
    keys,
    key_scales,
    rope_keys,
    rope_scales,
    values,
    value_scales,
    block_tables,
    table_stride,
    query_start,
    seq_lens,
    sinks,
    out,
    scale,
    softcap,
    num_kv_heads,
    num_seqs,
    most_of_others,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Attend one tile of rows and key head in each program.

    Sequences of no more tokens than ``most_of_others`` are handled by another launch.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last tokens of a prompt have the most keys: the longest work begins first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = _sequence_of(tile, query_start, num_seqs, TOKENS)
    start = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first_token = (tile - (start // TOKENS + seq)) * TOKENS
    if first_token >= count or length == 0 or count <= most_of_others:
        return
    last_token = tl.minimum(first_token + TOKENS, count) - 1

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (token <= last_token) & (row < TOKENS * GROUP)
    place = ((start + token) * num_kv_heads + head) * GROUP + row % GROUP
    query = _load_rows(q, place, is_row, KEY_DIM, KEY_WIDTH)
    rope_query = None
    if ROPE_DIM:
        rope_query = _load_rows(rope_q, place, is_row, ROPE_DIM, ROPE_DIM)
    position = length - count + token
    first_seen = _first_seen(length - count + first_token, WINDOW)
    end = length - count + last_token + 1

    table = block_tables + seq.to(tl.int64) * table_stride
    if SPLIT_KEYS:
        total, norm, top = _no_state(ROWS, VALUE_WIDTH)
        splits = tl.cdiv(end, SPLIT_KEYS)
        for split in tl.range(first_seen // SPLIT_KEYS, splits, num_stages=1):
            begin = split * SPLIT_KEYS
            other_total, other_norm, other_top = _attend(
                query, rope_query, position,
                keys, key_scales, rope_keys, rope_scales, values, value_scales,
                table, head, num_kv_heads,
                first_seen, begin, tl.minimum(end, begin + SPLIT_KEYS), scale, softcap,
                KEY_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, VALUE_STRIDE, BLOCK_SIZE,
                WINDOW, HAS_SOFTCAP, KEY_KIND, VALUE_KIND, ROWS, KEYS, STAGES, ROPE_DIM,
            )  # fmt: skip
            total, norm, top = _merge(total, norm, top, other_total, other_norm, other_top)
    else:
        total, norm, top = _attend(
            query, rope_query, position,
            keys, key_scales, rope_keys, rope_scales, values, value_scales,
            table, head, num_kv_heads, first_seen, 0, end, scale, softcap,
            KEY_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, VALUE_STRIDE, BLOCK_SIZE,
            WINDOW, HAS_SOFTCAP, KEY_KIND, VALUE_KIND, ROWS, KEYS, STAGES, ROPE_DIM,
        )  # fmt: skip
    _store_rows(
        out, place, is_row, total, norm, top, sinks, head, GROUP, VALUE_DIM, VALUE_WIDTH, ROWS
    )


@triton.jit(do_not_specialize=["table_stride", "num_splits", "saved_rows"])
def attend_splits(
    q,
    rope_q,
    keys,
    key_scales,
    rope_keys,
    rope_scales,
    values,
    value_scales,
    block_tables,
    table_stride,
    query_start,
    seq_lens,
    sinks,
    out,
    scale,
    softcap,
    num_kv_heads,
    states,
    counters,
    num_splits,
    saved_rows,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Attend one split of a sequence and key head in each program; some splits may be empty.

    Sequences of more rows than ``saved_rows`` are handled by another launch.
    """
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first_seen = _first_seen(length - count, WINDOW)
    base = first_seen // KEYS * KEYS
    span = tl.cdiv(tl.cdiv(length - base, KEYS), num_splits) * KEYS
    if SPLIT_KEYS:
        base = first_seen // SPLIT_KEYS * SPLIT_KEYS
        span = SPLIT_KEYS
    begin = base + split * span
    if begin >= length or count == 0 or count * GROUP > saved_rows:
        return

    row = tl.arange(0, ROWS)
    token = row // GROUP
    is_row = token < count
    place = ((start + token) * num_kv_heads + head) * GROUP + row % GROUP
    query = _load_rows(q, place, is_row, KEY_DIM, KEY_WIDTH)
    rope_query = None
    if ROPE_DIM:
        rope_query = _load_rows(rope_q, place, is_row, ROPE_DIM, ROPE_DIM)
    total, norm, top = _attend(
        query, rope_query, length - count + token,
        keys, key_scales, rope_keys, rope_scales, values, value_scales,
        block_tables + seq.to(tl.int64) * table_stride, head, num_kv_heads,
        first_seen, begin, tl.minimum(begin + span, length), scale, softcap,
        KEY_DIM, KEY_WIDTH, VALUE_DIM, VALUE_WIDTH, VALUE_STRIDE, BLOCK_SIZE,
        WINDOW, HAS_SOFTCAP, KEY_KIND, VALUE_KIND, ROWS, KEYS, STAGES, ROPE_DIM,
    )  # fmt: skip

    num_used = tl.cdiv(length - base, span)
    if num_used > 1:
        item = seq * num_kv_heads + head
        size = saved_rows * (VALUE_WIDTH + STATE_EXTRA)
        of_item = states + item.to(tl.int64) * num_splits * size
        _save(of_item + split * size, total, norm, top, saved_rows, VALUE_WIDTH, ROWS)
        # All threads have saved their part before one of them counts it.
        tl.debug_barrier()
        if tl.atomic_add(counters + item, 1, sem="acq_rel", scope="gpu") < num_used - 1:
            return
        tl.store(counters + item, 0)
        total, norm, top = _no_state(ROWS, VALUE_WIDTH)
        for other in tl.range(0, num_used, num_stages=3):
            other_total, other_norm, other_top = _saved(
                of_item + other * size, saved_rows, VALUE_WIDTH, ROWS
            )
            total, norm, top = _merge(total, norm, top, other_total, other_norm, other_top)
    _store_rows(
        out, place, is_row, total, norm, top, sinks, head, GROUP, VALUE_DIM, VALUE_WIDTH, ROWS
    )


@triton.jit
def _attend(
    query,
    rope_query,
    query_position,
    keys,
    key_scales,
    rope_keys,
    rope_scales,
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
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """State after the positions from ``begin``, a multiple of KEYS, to ``end``; no row sees
    positions before ``first_seen``."""
    total, norm, top = _no_state(ROWS, VALUE_WIDTH)
    key_dim, value_dim = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    is_key_dim, is_value_dim = key_dim < KEY_DIM, value_dim < VALUE_DIM
    first = tl.maximum(begin, first_seen // KEYS * KEYS)
    for tile in tl.range(first, end, KEYS, num_stages=STAGES):
        position = tile + tl.arange(0, KEYS)
        is_seen = (position >= first_seen) & (position < end)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        vector = slot if ROPE_DIM else slot * num_kv_heads + head

        at = vector[None, :] * KEY_DIM + key_dim[:, None]
        key = tl.load(keys + at, mask=is_seen[None, :] & is_key_dim[:, None], other=0)
        key = code_values(key, query.dtype, KEY_KIND)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if KEY_KIND != "float":
            score *= tl.load(key_scales + vector, mask=is_seen, other=0.0)[None, :]
        if ROPE_DIM:
            at = vector[None, :] * ROPE_DIM + tl.arange(0, ROPE_DIM)[:, None]
            rope_key = tl.load(rope_keys + at, mask=is_seen[None, :], other=0)
            rope_key = code_values(rope_key, query.dtype, VALUE_KIND)
            rope_score = tl.dot(rope_query, rope_key, input_precision="ieee") * scale
            if VALUE_KIND != "float":
                rope_score *= tl.load(rope_scales + vector, mask=is_seen, other=0.0)[None, :]
            score += rope_score
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
        if ROPE_DIM:
            value = tl.trans(key)
        else:
            at = vector[:, None] * VALUE_STRIDE + value_dim[None, :]
            value = tl.load(values + at, mask=is_seen[:, None] & is_value_dim[None, :], other=0)
            value = code_values(value, query.dtype, VALUE_KIND)
        if VALUE_KIND != "float":
            weight *= tl.load(value_scales + vector, mask=is_seen, other=0.0)[None, :]
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
    """Merge two states into one. A state of no keys changes no bit of the other."""
    new_top = tl.maximum(top, other_top)
    base = _finite(new_top)
    own, others = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * own[:, None] + other_total * others[:, None]
    return total, norm * own + other_norm * others, new_top


@triton.jit
def _finite(top):
    """Replace -inf by 0, so that rows which have seen nothing yet have weights of 0 instead of
    NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _save(state, total, norm, top, saved_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    is_saved = row < saved_rows
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(state + at, total, mask=is_saved[:, None])
    tl.store(state + saved_rows * WIDTH + row, norm, mask=is_saved)
    tl.store(state + saved_rows * (WIDTH + 1) + row, top, mask=is_saved)


@triton.jit
def _saved(state, saved_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Load a state that another program saved, past this processor's own cache."""
    row = tl.arange(0, ROWS)
    is_saved = row < saved_rows
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.load(state + at, mask=is_saved[:, None], other=0.0, cache_modifier=".cg")
    state += saved_rows * WIDTH
    norm = tl.load(state + row, mask=is_saved, other=0.0, cache_modifier=".cg")
    top = tl.load(
        state + saved_rows + row, mask=is_saved, other=float("-inf"), cache_modifier=".cg"
    )
    return total, norm, top


@triton.jit
def _sequence_of(tile, query_start, num_seqs, TOKENS: tl.constexpr):
    """The last sequence whose tiles of rows begin at ``tile`` or before, by bisection.

    The tiles of sequence s begin at query_start[s] // TOKENS + s; tiles between sequences may be
    unused.
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
    """Normalize and store rows. A sink takes its part of the weight, and has no value."""
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
