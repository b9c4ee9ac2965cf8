"""Log-probabilities of sampled tokens, and the likeliest tokens, on the GPU.

The greatest logits are found as keys, with the logit in the high bits and 2^32 - 1 minus the token
id in the low ones: no two keys are equal, and of equal logits the lowest id comes first.
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
    int_of,
    load_chunk,
    row_peak,
    total_of,
    weights_of,
)
from octavo.kernels.cuda.sampling import SampledTokens

_WIDTH = triton.next_power_of_2(sampling.MAX_TOP)  # memory for a chunk's keys

_LOGPROBS = tl.constexpr(sampling.LOGPROBS)
_WORDS = tl.constexpr(sampling.LOGPROB_WORDS)
_TOTAL = tl.constexpr(sampling.TOTAL)
_PEAK = tl.constexpr(sampling.PEAK)
_LOGIT = tl.constexpr(sampling.LOGIT)
_RANK = tl.constexpr(sampling.RANK)
_TOP_IDS = tl.constexpr(sampling.TOP_IDS)
_TOP_LOGITS = tl.constexpr(sampling.TOP_LOGITS)
_HAS_TOKEN = tl.constexpr(sampling.HAS_TOKEN)
_LEAST = tl.constexpr(-(2**63))
_GREATEST = tl.constexpr(2**63 - 1)


@dataclass(frozen=True, slots=True)
class LogprobScratch:
    """Results of each chunk of each row."""

    weights: Tensor  # int64 [rows, chunks]: sums of 2^44 exp(logit - peak of the row)
    ranks: Tensor  # int32 [rows, chunks]: tokens with a greater logit than the row's token
    keys: Tensor  # int64 [rows, chunks, _WIDTH]: the greatest, in descending order

    @classmethod
    def allocate(cls, num_rows: int, num_chunks: int, device: torch.device | str) -> Self:
        shape = num_rows, num_chunks
        return cls(
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty((*shape, _WIDTH), dtype=torch.int64, device=device),
        )


def write_logprobs(
    logits_of: LogitsOf,
    peaks: Tensor,
    out: SampledTokens,
    num_top: int,
    scratch: LogprobScratch,
) -> None:
    """Write ``out.logprobs`` of the rows that request them and have a token.

    Args:
        peaks: float32 [R, chunks], of those logits.
    """
    num_rows, vocab_size = logits_of.logits.shape
    blocks = {"WIDTH": _WIDTH, **block_sizes(vocab_size)}
    row = *logits_of.unmasked(), peaks, *out.answers, num_top
    found = scratch.weights, scratch.ranks, scratch.keys
    _logprobs_of_chunk[(num_rows, scratch.weights.shape[1])](*row, *found, **blocks)
    _logprobs_of_row[(num_rows,)](*row, *found, out.logprobs, **blocks)


@triton.jit(do_not_specialize=["mask_stride", "num_top"])
def _logprobs_of_chunk(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    token_ids,
    status,
    num_top,
    weights,
    ranks,
    keys,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (int_of(records, row, _LOGPROBS) >= 0) & (tl.load(status + row) == _HAS_TOKEN):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens)
        peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
        own = tl.load(logits + row * stride + tl.load(token_ids + row))
        here = row * num_chunks + chunk
        tl.store(weights + here, tl.sum(weights_of(values - peak), 0))
        tl.store(ranks + here, tl.sum((values > own).to(tl.int32), 0))
        found = tl.where(tokens < vocab_size, _keys_of(values, tokens), _LEAST)
        key = _GREATEST
        for place in range(num_top):
            key = _next(found, key)
            tl.store(keys + here * WIDTH + place, key)


@triton.jit(do_not_specialize=["mask_stride", "num_top"])
def _logprobs_of_row(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    token_ids,
    status,
    num_top,
    weights,
    ranks,
    keys,
    logprobs,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if (int_of(records, row, _LOGPROBS) >= 0) & (tl.load(status + row) == _HAS_TOKEN):
        out = logprobs + row * _WORDS
        total, _ = total_of(weights, row, num_chunks, CHUNKS)
        tl.store(out + _TOTAL, total.to(tl.int32))
        tl.store(out + _TOTAL + 1, (total >> 32).to(tl.int32))
        peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
        own = tl.load(logits + row * stride + tl.load(token_ids + row))
        tl.store(out + _PEAK, peak.to(tl.int32, bitcast=True))
        tl.store(out + _LOGIT, own.to(tl.int32, bitcast=True))
        greater, _ = total_of(ranks, row, num_chunks, CHUNKS)
        tl.store(out + _RANK, greater + 1)
        place = tl.arange(0, CHUNKS * WIDTH)
        exists = (place // WIDTH < num_chunks) & (place % WIDTH < num_top)
        found = tl.load(keys + row * num_chunks * WIDTH + place, mask=exists, other=_LEAST)
        key = _GREATEST
        for rank in range(num_top):
            key = _next(found, key)
            tl.store(out + _TOP_IDS + rank, (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32))
            tl.store(out + _TOP_LOGITS + rank, _swapped((key >> 32).to(tl.int32)))


@triton.jit
def _keys_of(logits, tokens):
    bits = _swapped((logits + 0.0).to(tl.int32, bitcast=True))  # -0.0 becomes 0.0
    return (bits.to(tl.int64) << 32) | (0xFFFFFFFF - tokens.to(tl.int64))


@triton.jit
def _swapped(bits):
    """Map the bits of a float to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _next(keys, key):
    """The greatest key that is less than ``key``."""
    return tl.max(tl.where(keys < key, keys, _LEAST), 0)
