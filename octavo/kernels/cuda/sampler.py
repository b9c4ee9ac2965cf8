"""Sampling on the GPU: the same tokens as ``runtime/sampler.py``.

A row is cut into chunks, each of which has a program of its own::

    peaks     [R, chunks]   the greatest logit of a chunk, and the lowest id that has it
    weights   [R, chunks]   int64: sums of 2^44 exp((logit - peak of the row) / temperature)
    tokens    [R]           greedy: the id of the first greatest peak; else the chunk, and in it
                            the token, at which the running sum exceeds uniform * total

Steps that use more options launch more kernels: biases and penalties are added to the logits first
and removed again in the end, masks are read with the logits; tokens of rows with top_k, top_p or
typical_p are found in ``sampler_cuts.py``, and log-probabilities in ``sampler_logprobs.py``.

Weights are integers, whose sums are the same in any order (``runtime/logits.py``), and the uniform
number is a function of the row's seed, sample and position (``runtime/random.py``). So the token of
a row depends on the row alone.

The oracle's ``exp`` is that of a library. The one here differs from it in the last bit now and
then, which moves the bounds between tokens by some 10^-7 of the mass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda import sampling
from octavo.kernels.cuda.sampler_cuts import CutScratch, pick_cut
from octavo.kernels.cuda.sampler_logprobs import LogprobScratch, write_logprobs
from octavo.kernels.cuda.sampler_parts import (
    CHUNK,
    LogitsOf,
    block_sizes,
    exceeds,
    first_greatest,
    float_of,
    is_finite,
    load_chunk,
    remember,
    row_peak,
    shape,
    target_of,
    total_of,
    weights_of,
)
from octavo.kernels.cuda.sampling import Asked, SampledTokens, SamplingTensors
from octavo.kernels.cuda.token_feed import resolve_placeholders

_MAX_VOCAB_SIZE = 2**19 - 1  # the sum of so many weights is less than 2^63
_EDITS = 512  # edits that a program makes at a time

_TEMPERATURE = tl.constexpr(sampling.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(sampling.LOG_MIN_P)
_REPETITION = tl.constexpr(sampling.REPETITION)
_FREQUENCY = tl.constexpr(sampling.FREQUENCY)
_PRESENCE = tl.constexpr(sampling.PRESENCE)
_HAS_TOKEN = tl.constexpr(sampling.HAS_TOKEN)
_BAD_LOGITS = tl.constexpr(sampling.BAD_LOGITS)
_OVERFLOW = tl.constexpr(sampling.OVERFLOW)
_NO_TOKEN_LEFT = tl.constexpr(sampling.NO_TOKEN_LEFT)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Results of each chunk of each row that kernels pass on: [rows, chunks]."""

    raw_peaks: Tensor  # float32, of the original logits; NaN if there is one
    raw_ids: Tensor  # int32, the lowest ids that have them
    peaks: Tensor  # the same for changed logits
    ids: Tensor
    weights: Tensor  # int64

    @classmethod
    def allocate(cls, num_rows: int, num_chunks: int, device: torch.device | str) -> Self:
        shape = num_rows, num_chunks
        types = torch.float32, torch.int32, torch.float32, torch.int32, torch.int64
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in types))


class TritonSampler:
    """A ``DeviceSampler`` of Triton kernels, with their memory for ``max_rows`` rows."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str):
        assert vocab_size <= _MAX_VOCAB_SIZE
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        self._scratch = _Scratch.allocate(max_rows, num_chunks, device)
        self._cuts = CutScratch.allocate(max_rows, vocab_size, num_chunks, device)
        self._logprobs = LogprobScratch.allocate(max_rows, num_chunks, device)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        parts = self._scratch, self._cuts, self._logprobs
        return sum(getattr(part, f.name).nbytes for part in parts for f in fields(part))

    def sample(
        self, logits: Tensor, rows: SamplingTensors, asked: Asked, out: SampledTokens
    ) -> None:
        """Compute ``DeviceSampler.sample``."""
        num_rows, vocab_size = logits.shape
        scratch = self._scratch
        assert logits.dtype == torch.float32 and logits.stride(1) == 1
        assert triton.cdiv(vocab_size, CHUNK) == scratch.weights.shape[1]
        assert num_rows <= min(len(scratch.weights), len(rows.records), len(out.logprobs))
        if num_rows == 0:
            return
        logits_of, blocks = LogitsOf.rows(logits, rows, asked), block_sizes(vocab_size)
        grid = num_rows, scratch.weights.shape[1]
        raw = peaks = scratch.raw_peaks, scratch.raw_ids
        _find_peaks[grid](*logits_of.unmasked(), *raw, **blocks)
        originals = _edit(logits, rows) if asked.edits else None
        if asked.edits or asked.masks:
            peaks = scratch.peaks, scratch.ids
            _find_peaks[grid](*logits_of, *peaks, **blocks)
        _sum_weights[grid](*logits_of, peaks[0], scratch.weights, **blocks)
        chunks = raw[0], *peaks, scratch.weights
        given = out.status, out.token_ids, rows.slots, rows.last_tokens
        _pick[(num_rows,)](*logits_of, *chunks, *given, **blocks)
        if asked.cuts:
            pick_cut(logits_of, peaks[0], rows, out, self._cuts, has_typical=asked.typical)
        if originals is not None:
            _undo(logits, rows, originals)
        if asked.num_top is not None:
            write_logprobs(logits_of, raw[0], out, asked.num_top, self._logprobs)

    def resolve(self, token_ids: Tensor, last_tokens: Tensor) -> None:
        """Compute ``DeviceSampler.resolve``."""
        resolve_placeholders(token_ids, last_tokens)


@triton.jit(do_not_specialize=["mask_stride"])
def _find_peaks(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    ids,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens)
    peak, first = first_greatest(values, tokens)
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(ids + row * num_chunks + chunk, first)


@triton.jit(do_not_specialize=["mask_stride"])
def _sum_weights(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    peaks,
    weights,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = float_of(records, row, _TEMPERATURE)
    peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
    if (heat > 0.0) & is_finite(peak):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens)
        own = weights_of(shape(values, peak, heat, float_of(records, row, _LOG_MIN_P)))
        tl.store(weights + row * num_chunks + chunk, tl.sum(own, 0))


@triton.jit(do_not_specialize=["mask_stride"])
def _pick(
    logits,
    stride,
    vocab_size,
    num_chunks,
    records,
    masks,
    mask_stride,
    raw_peaks,
    peaks,
    ids,
    weights,
    status,
    token_ids,
    slots,
    last_tokens,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, likeliest = row_peak(peaks, row, num_chunks, CHUNKS)
    raw_peak, _ = row_peak(raw_peaks, row, num_chunks, CHUNKS)
    state = _status(raw_peak, peak)
    token = 0
    if state == _HAS_TOKEN:
        heat = float_of(records, row, _TEMPERATURE)
        if heat > 0.0:
            total, of_chunks = total_of(weights, row, num_chunks, CHUNKS)
            target = target_of(records, row, total)
            chunk, mass = exceeds(of_chunks, target)
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            values = load_chunk(
                logits, stride, vocab_size, records, masks, mask_stride, row, tokens
            )
            own = weights_of(shape(values, peak, heat, float_of(records, row, _LOG_MIN_P)))
            column, _mass = exceeds(own, target - mass)
            token = chunk * CHUNK + column
        else:
            token = tl.load(ids + row * num_chunks + likeliest)
    tl.store(status + row, state)
    tl.store(token_ids + row, token)
    remember(last_tokens, slots, row, token)


@triton.jit
def _status(raw_peak, peak):
    """Status of a row, by its greatest logits before and after biases, penalties and masks."""
    state = tl.where(peak == float("-inf"), _NO_TOKEN_LEFT, _OVERFLOW)
    state = tl.where(is_finite(peak), _HAS_TOKEN, state)
    return tl.where(is_finite(raw_peak), state, _BAD_LOGITS)


def _edit(logits: Tensor, rows: SamplingTensors) -> Tensor:
    """Add biases and penalties to logits. Returns the original values, float32 [E]."""
    assert rows.edits is not None and rows.edit_starts is not None
    originals = torch.empty_like(rows.edits[0], dtype=torch.float32)
    _change[(len(logits),)](
        *_edit_arguments(logits, rows, originals),
        rows.records,
        BLOCK=_EDITS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return originals


def _undo(logits: Tensor, rows: SamplingTensors, originals: Tensor) -> None:
    _put_back[(len(logits),)](*_edit_arguments(logits, rows, originals), BLOCK=_EDITS, num_warps=4)


def _edit_arguments(logits: Tensor, rows: SamplingTensors, originals: Tensor) -> tuple[Any, ...]:
    assert rows.edits is not None
    token_ids, biases, counts = rows.edits
    edits = token_ids, biases.view(torch.float32), counts
    return logits, logits.stride(0), originals, rows.edit_starts, *edits


@triton.jit
def _change(
    logits,
    stride,
    originals,
    starts,
    token_ids,
    biases,
    counts,
    records,
    BLOCK: tl.constexpr,
):
    """Apply ``apply_logit_bias`` and ``apply_penalties`` of ``runtime/logits.py`` to a row's
    tokens."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    repetition = float_of(records, row, _REPETITION)
    frequency = float_of(records, row, _FREQUENCY)
    presence = float_of(records, row, _PRESENCE)
    for begin in range(tl.load(starts + row), end, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        exists = place < end
        own = logits + row * stride + tl.load(token_ids + place, mask=exists, other=0)
        original = tl.load(own, mask=exists, other=0.0)
        count = tl.load(counts + place, mask=exists, other=-1)
        value = original + tl.load(biases + place, mask=exists, other=0.0)
        factor = tl.zeros_like(value) + repetition
        seen = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        seen = seen - frequency * count.to(tl.float32)
        seen = seen - presence * (count > 0).to(tl.float32)
        tl.store(originals + place, original, mask=exists)
        tl.store(own, tl.where(count < 0, value, seen), mask=exists)


@triton.jit
def _put_back(logits, stride, originals, starts, token_ids, biases, counts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for begin in range(tl.load(starts + row), end, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        exists = place < end
        own = logits + row * stride + tl.load(token_ids + place, mask=exists, other=0)
        tl.store(own, tl.load(originals + place, mask=exists, other=0.0), mask=exists)
