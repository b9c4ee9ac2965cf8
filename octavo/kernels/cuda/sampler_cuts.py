"""Sampling with top_k, top_p and typical_p, without a sort.

These keep a prefix of the row in some order: from the likeliest token on, or from the token whose
information is nearest to the entropy; and with top_k or top_p, the drawn token is where a sum in
the first of these orders exceeds a number. So there is one question: in an order of keys, and of
equal keys the lowest id first, at which token does the running sum of counts or weights exceed a
target? A key is the bits of a float that is not negative, and is found digit by digit, eleven times
three bits, from the sums below each of eight candidates. All is exact: sums are of integers.

One program answers that for a row. It reads a list, which programs of chunks make before it, of the
tokens that can be kept at all: mostly a few hundred::

    marks   [R, chunks, 16]   how many tokens of a chunk, and how much weight, are above each of
                              sixteen levels of the logits
    list    [R, V]            the tokens above the first level that is low enough for the row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda import sampling
from octavo.kernels.cuda.sampler_parts import (
    LogitsOf,
    block_sizes,
    double_of,
    float_of,
    int_of,
    load_chunk,
    remember,
    row_peak,
    shape,
    target_of,
    weights_of,
)
from octavo.kernels.cuda.sampling import SampledTokens, SamplingTensors

_BLOCK = 1024  # entries of a list processed at a time
_NUM_LEVELS = 16

_LEVELS = tl.constexpr(_NUM_LEVELS)
_LEVEL = tl.constexpr(2.0)  # between two levels: the last is at -32, where nothing has weight

_TEMPERATURE = tl.constexpr(sampling.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(sampling.LOG_MIN_P)
_TOP_K = tl.constexpr(sampling.TOP_K)
_TOP_P = tl.constexpr(sampling.TOP_P)
_TYPICAL_P = tl.constexpr(sampling.TYPICAL_P)
_HAS_TOKEN = tl.constexpr(sampling.HAS_TOKEN)

# Orders, and the numbers that are summed in them.
_COUNTS = tl.constexpr(0)  # counts of tokens, the likeliest first
_WEIGHTS = tl.constexpr(1)  # weights, the likeliest first
_TYPICAL = tl.constexpr(2)  # weights, the most typical first
_BY_ID = tl.constexpr(3)  # weights, in the order of the list


@dataclass(frozen=True, slots=True)
class CutScratch:
    """Results of chunks for the program of the row."""

    counts: Tensor  # int32 [rows, chunks, 16]
    masses: Tensor  # int64 [rows, chunks, 16]
    totals: Tensor  # int64 [rows]: the weight of the whole row
    lengths: Tensor  # int32 [rows]: of the list
    values: Tensor  # float32 [rows, V]: shaped logits, of which the greatest is 0
    ids: Tensor  # int32 [rows, V], ascending

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, num_chunks: int, device: torch.device | str
    ) -> Self:
        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        return cls(
            empty(torch.int32, num_chunks, _NUM_LEVELS),
            empty(torch.int64, num_chunks, _NUM_LEVELS),
            empty(torch.int64),
            empty(torch.int32),
            empty(torch.float32, vocab_size),
            empty(torch.int32, vocab_size),
        )


def pick_cut(
    logits_of: LogitsOf,
    peaks: Tensor,
    rows: SamplingTensors,
    out: SampledTokens,
    scratch: CutScratch,
    *,
    has_typical: bool,
) -> None:
    """Write the tokens of rows that draw from a part of their tokens; others stay as they are.

    Args:
        peaks: float32 [rows, chunks], of those logits.
        has_typical: whether a row has a typical_p.
    """
    num_rows, vocab_size = logits_of.logits.shape
    grid, blocks = (num_rows, peaks.shape[1]), block_sizes(vocab_size)
    row = *logits_of, peaks, out.status
    marks = scratch.counts, scratch.masses
    listed = scratch.totals, scratch.lengths, scratch.values, scratch.ids
    _mark[grid](*row, *marks, **blocks)
    _list[grid](*row, *marks, *listed, **blocks)
    of_lists = vocab_size, logits_of.records, out.status, *listed
    if has_typical:
        _keep_typical[(num_rows,)](*of_lists, BLOCK=_BLOCK, num_warps=16)
    given = out.token_ids, rows.slots, rows.last_tokens
    _pick_cut[(num_rows,)](*of_lists, *given, BLOCK=_BLOCK, num_warps=16)


@triton.jit(do_not_specialize=["mask_stride"])
def _mark(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    status,
    counts,
    masses,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
    if _is_cut(records, row, vocab_size, status):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens)
        shaped = _shape(values, peak, records, row)
        weights = weights_of(shaped)
        at = (row * num_chunks + chunk) * _LEVELS
        for level in range(_LEVELS):
            is_above = shaped > (level + 1) * -_LEVEL
            tl.store(counts + at + level, tl.sum(is_above.to(tl.int32), 0))
            tl.store(masses + at + level, tl.sum(tl.where(is_above, weights, 0), 0))


@triton.jit(do_not_specialize=["mask_stride"])
def _list(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    status,
    counts,
    masses,
    totals,
    lengths,
    listed,
    ids,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
    if _is_cut(records, row, vocab_size, status):
        place = tl.arange(0, CHUNKS)
        exists = place < num_chunks
        at = (row * num_chunks + place) * _LEVELS
        total = tl.sum(tl.load(masses + at + _LEVELS - 1, mask=exists, other=0), 0)
        level = _low_enough(records, row, vocab_size, num_chunks, counts, masses, total, CHUNKS)
        of_chunks = tl.load(counts + at + level, mask=exists, other=0)
        if chunk == 0:
            tl.store(totals + row, total)
            tl.store(lengths + row, tl.sum(of_chunks, 0))
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens)
        shaped = _shape(values, peak, records, row)
        is_above = shaped > (level + 1) * -_LEVEL
        before = tl.sum(tl.where(place < chunk, of_chunks, 0), 0)
        own = row * vocab_size + before + tl.cumsum(is_above.to(tl.int32), 0) - 1
        tl.store(listed + own, shaped, mask=is_above)
        tl.store(ids + own, tokens, mask=is_above)


@triton.jit
def _keep_typical(
    vocab_size,
    records,
    status,
    totals,
    lengths,
    listed,
    ids,
    BLOCK: tl.constexpr,
):
    """Apply ``apply_typical_p`` of ``runtime/logits.py`` to the list, and shift its greatest to
    0."""
    row = tl.program_id(0).to(tl.int64)
    typical_p = double_of(records, row, _TYPICAL_P)
    if _is_cut(records, row, vocab_size, status) & (typical_p < 1.0):
        values, length = listed + row * vocab_size, tl.load(lengths + row)
        total = tl.load(totals + row)
        mean = _mean_surprise(values, length, total, BLOCK)
        target = _last_within(typical_p, total)
        key, before = _locate(values, length, target, mean, _TYPICAL, BLOCK)
        last = _place_of(values, length, key, target - before, mean, _TYPICAL, BLOCK)
        top = float("-inf")
        for begin in range(0, length, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            own = _load_typical(values, place, length, key, last, mean)
            top = tl.maximum(top, tl.max(own, 0))
        total = total * 0
        for begin in range(0, length, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            own = _load_typical(values, place, length, key, last, mean) - top
            total += tl.sum(weights_of(own), 0)
            tl.store(values + place, own, mask=place < length)
        tl.store(totals + row, total)


@triton.jit
def _pick_cut(
    vocab_size,
    records,
    status,
    totals,
    lengths,
    listed,
    ids,
    token_ids,
    slots,
    last_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _is_cut(records, row, vocab_size, status):
        values, length = listed + row * vocab_size, tl.load(lengths + row)
        top_k, top_p = int_of(records, row, _TOP_K), double_of(records, row, _TOP_P)
        kept = tl.load(totals + row)
        if _has_top_k(records, row, vocab_size) & (top_k <= length):
            key, before = _locate(values, length, top_k.to(tl.int64) - 1, 0.0, _COUNTS, BLOCK)
            kept = _weight_below(values, length, key, BLOCK) + (top_k - before) * _weight_at(key)
        if top_p < 1.0:
            target = _last_within(top_p, kept)
            key, before = _locate(values, length, target, 0.0, _WEIGHTS, BLOCK)
            weight = _weight_at(key)
            kept = before + ((target - before) // weight + 1) * weight
        target = target_of(records, row, kept)
        if _has_top_k(records, row, vocab_size) | (top_p < 1.0):
            key, before = _locate(values, length, target, 0.0, _WEIGHTS, BLOCK)
            place = _place_of(values, length, key, target - before, 0.0, _WEIGHTS, BLOCK)
        else:
            place = _place_of(values, length, 0, target, 0.0, _BY_ID, BLOCK)
        token = tl.load(ids + row * vocab_size + place)
        tl.store(token_ids + row, token)
        remember(last_tokens, slots, row, token)


@triton.jit
def _is_cut(records, row, vocab_size, status):
    """True for a row that has a token and draws it from a part of its tokens."""
    has_cut = _has_top_k(records, row, vocab_size) | (double_of(records, row, _TOP_P) < 1.0)
    has_cut |= double_of(records, row, _TYPICAL_P) < 1.0
    has_token = tl.load(status + row) == _HAS_TOKEN
    return has_cut & has_token & (float_of(records, row, _TEMPERATURE) > 0.0)


@triton.jit
def _has_top_k(records, row, vocab_size):
    top_k = int_of(records, row, _TOP_K)
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _shape(values, peak, records, row):
    heat, log_min_p = float_of(records, row, _TEMPERATURE), float_of(records, row, _LOG_MIN_P)
    return shape(values, peak, heat, log_min_p)


@triton.jit
def _low_enough(records, row, vocab_size, num_chunks, counts, masses, total, CHUNKS: tl.constexpr):
    """The first level above which there are as many tokens as top_k keeps, or without it as much
    weight as top_p does.

    It is the last level, above which is all weight, if there is none, and for typical_p.
    """
    level = tl.arange(0, _LEVELS)
    place = tl.arange(0, CHUNKS)
    at = (row * num_chunks + place)[:, None] * _LEVELS + level[None, :]
    exists = (place < num_chunks)[:, None]
    if _has_top_k(records, row, vocab_size):
        above = tl.sum(tl.load(counts + at, mask=exists, other=0), 0)
        is_enough = above >= int_of(records, row, _TOP_K)
    else:
        mass = tl.sum(tl.load(masses + at, mask=exists, other=0), 0)
        # With a margin: as a float64, a mass may be off by a thousand.
        limit = double_of(records, row, _TOP_P) * total.to(tl.float64)
        is_enough = (mass - 4096).to(tl.float64) >= limit
    first = tl.min(tl.where(is_enough, level, _LEVELS - 1), 0)
    return tl.where(double_of(records, row, _TYPICAL_P) < 1.0, _LEVELS - 1, first)


@triton.jit
def _mean_surprise(values, length, total, BLOCK: tl.constexpr):
    """The entropy of a list's tokens, minus the surprise at the likeliest: float64."""
    terms = total * 0
    for begin in range(0, length, BLOCK):
        own = _load(values, begin + tl.arange(0, BLOCK), length)
        weights = weights_of(own)
        surprise = tl.where(weights > 0, -own, 0.0).to(tl.float64)
        terms += tl.sum((weights.to(tl.float64) * surprise).to(tl.int64), 0)
    return terms.to(tl.float64) / total.to(tl.float64)


@triton.jit
def _last_within(share, total):
    """The greatest number that is less than a share of a total of weights."""
    limit = share * total.to(tl.float64)
    below = limit.to(tl.int64)
    below -= (below.to(tl.float64) >= limit).to(tl.int64)
    return tl.minimum(tl.maximum(below, 0), total - 1)


@triton.jit
def _locate(values, length, target, mean, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """The key at which the running sum exceeds ``target``, which is less than the whole sum; and
    the sum before all tokens with that key."""
    digits = tl.arange(0, 8)
    key, before = 0, target * 0
    for step in range(11):
        shift = tl.maximum(28 - 3 * step, 0)
        sums = _sums_below(values, length, key + (digits << shift), mean, ORDER, BLOCK)
        digit = tl.sum((sums <= target).to(tl.int32), 0) - 1  # sums ascend from 0
        key += digit << shift
        before = tl.sum(tl.where(digits == digit, sums, 0), 0)
    return key, before


@triton.jit
def _sums_below(values, length, keys, mean, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the tokens whose keys are less than each of several: int64 [8]."""
    sums = tl.zeros(keys.shape, tl.int64)
    for begin in range(0, length, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        own = _load(values, place, length)
        counted = (place < length).to(tl.int64) if ORDER == _COUNTS else weights_of(own)
        is_below = _key(own, mean, ORDER)[:, None] < keys[None, :]
        sums += tl.sum(tl.where(is_below, counted[:, None], 0), 0)
    return sums


@triton.jit
def _weight_below(values, length, key, BLOCK: tl.constexpr):
    """The weight of all tokens that are likelier than a token with that key."""
    weight = tl.zeros([], tl.int64)
    for begin in range(0, length, BLOCK):
        own = _load(values, begin + tl.arange(0, BLOCK), length)
        is_below = _key(own, 0.0, _WEIGHTS) < key
        weight += tl.sum(tl.where(is_below, weights_of(own), 0), 0)
    return weight


@triton.jit
def _weight_at(key):
    """The weight of each token with that key, in the order of likelihood."""
    return weights_of(-key.to(tl.float32, bitcast=True))


@triton.jit
def _place_of(values, length, key, target, mean, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Place in the list at which the running sum of the weights with a key exceeds ``target``."""
    place_of, before = 0, target * 0
    for begin in range(0, length, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        own = _load(values, place, length)
        weights = weights_of(own)
        if ORDER != _BY_ID:
            weights = tl.where(_key(own, mean, ORDER) == key, weights, 0)
        is_before = (before + tl.cumsum(weights, 0) <= target) & (place < length)
        place_of += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(weights, 0)
    return tl.minimum(place_of, length - 1)


@triton.jit
def _load(values, place, length):
    return tl.load(values + place, mask=place < length, other=float("-inf"))


@triton.jit
def _load_typical(values, place, length, key, last, mean):
    """Values of the list, with -inf behind the token with a key at the place ``last``."""
    own = _load(values, place, length)
    own_key = _key(own, mean, _TYPICAL)
    return tl.where((own_key < key) | ((own_key == key) & (place <= last)), own, float("-inf"))


@triton.jit
def _key(shaped, mean, ORDER: tl.constexpr):
    """Bits of a float that is not negative: int32, in the order of tokens."""
    if ORDER == _TYPICAL:
        distance = tl.abs(mean + shaped.to(tl.float64)).to(tl.float32)
    else:
        distance = tl.abs(shaped)
    return distance.to(tl.int32, bitcast=True)
