"""From logits to tokens on the GPU: the same tokens as ``runtime/sampler.py`` gives.

A row is cut into chunks, which programs of their own look at, three times::

    peaks     [R, chunks]   the greatest logit of a chunk, and the lowest id that has it
    weights   [R, chunks]   int64: sums of 2^44 exp((logit - peak of the row) / temperature)
    tokens    [R]           greedy: the id of the first greatest peak; else the chunk, and in it
                            the token, at which the running sum exceeds uniform * total

Weights are integers, whose sums are the same in any order (``runtime/logits.py``), and the uniform
number is a function of the row's seed, sample and position (``runtime/random.py``). So the token of
a row depends on nothing but the row.

The oracle's ``exp`` is that of a library. The one here differs from it in the last bit now and
then, which moves the bounds between tokens by some 10^-7 of the mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048  # tokens, of which a thread has sixteen
_MAX_VOCAB_SIZE = 2**19 - 1  # the sum of so many weights is less than 2^63


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each of R rows is sampled."""

    temperature: Tensor  # float32 [R]; 0: the likeliest token
    log_min_p: Tensor  # float32 [R]; -inf: nothing is cut
    seed: Tensor  # int64 [R], the bits of what is unsigned elsewhere
    sample_index: Tensor  # int32 [R], likewise
    position: Tensor  # int64 [R], of the token among the generated ones


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the kernels tell each other of each chunk of each row: [rows, chunks]."""

    peaks: Tensor  # float32; NaN if there is one among the logits
    ids: Tensor  # int32
    weights: Tensor  # int64

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Chunks:
        shape = num_rows, triton.cdiv(vocab_size, _CHUNK)
        types = torch.float32, torch.int32, torch.int64
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in types))


def sample(
    logits: Tensor, params: RowParams, chunks: Chunks, token_ids: Tensor, peaks: Tensor
) -> None:
    """The next token of each row, without a word from the host.

    Args:
        logits: float32 [R, V]; -inf for what may not come.
        params: of R rows or more.
        chunks: of R rows or more, for V; overwritten.
        token_ids: int32 [R], written.
        peaks: float32 [R], written: the greatest logit, NaN if one is. Where it is not finite,
            the row has no token, and id 0.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert vocab_size <= _MAX_VOCAB_SIZE
    assert chunks.peaks.shape[1] == num_chunks, (chunks.peaks.shape, logits.shape)
    assert min(map(len, (chunks.peaks, params.seed, token_ids, peaks))) >= num_rows
    if num_rows == 0:
        return
    of_chunks = chunks.peaks, chunks.ids, chunks.weights
    row = logits, logits.stride(0), vocab_size, num_chunks, *of_chunks
    shape = params.temperature, params.log_min_p
    random = params.seed, params.sample_index, params.position
    blocks = {"CHUNK": _CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": 4}
    _find_peaks[(num_rows, num_chunks)](*row, **blocks)
    _sum_weights[(num_rows, num_chunks)](*row, *shape, **blocks)
    _pick[(num_rows,)](*row, *shape, *random, token_ids, peaks, **blocks)


@triton.jit
def _find_peaks(
    logits,
    stride,
    vocab_size,
    num_chunks,
    peaks,
    ids,
    weights,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = _load_chunk(logits + row * stride, chunk, vocab_size, CHUNK)
    peak, first = _first_greatest(values, chunk * CHUNK + tl.arange(0, CHUNK))
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(ids + row * num_chunks + chunk, first)


@triton.jit
def _sum_weights(
    logits,
    stride,
    vocab_size,
    num_chunks,
    peaks,
    ids,
    weights,
    temperature,
    log_min_p,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    peak, _ = _row_peak(peaks + row * num_chunks, num_chunks, CHUNKS)
    if (heat > 0.0) & (tl.abs(peak) < float("inf")):
        values = _load_chunk(logits + row * stride, chunk, vocab_size, CHUNK)
        own = _token_weights(values, peak, heat, tl.load(log_min_p + row))
        tl.store(weights + row * num_chunks + chunk, tl.sum(own, 0))


@triton.jit
def _pick(
    logits,
    stride,
    vocab_size,
    num_chunks,
    peaks,
    ids,
    weights,
    temperature,
    log_min_p,
    seed,
    sample_index,
    position,
    token_ids,
    row_peaks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    peak, likeliest = _row_peak(peaks + row * num_chunks, num_chunks, CHUNKS)
    token = 0
    if tl.abs(peak) < float("inf"):
        if heat > 0.0:
            number = _uniform(
                tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row)
            )
            place = tl.arange(0, CHUNKS)
            exists = place < num_chunks
            of_chunks = tl.load(weights + row * num_chunks + place, mask=exists, other=0)
            target = (number * tl.sum(of_chunks, 0).to(tl.float64)).to(tl.int64)
            chunk, before = _exceeds(of_chunks, target)
            values = _load_chunk(logits + row * stride, chunk, vocab_size, CHUNK)
            own = _token_weights(values, peak, heat, tl.load(log_min_p + row))
            column, _ = _exceeds(own, target - before)
            token = chunk * CHUNK + column
        else:
            token = tl.load(ids + row * num_chunks + likeliest)
    tl.store(token_ids + row, token)
    tl.store(row_peaks + row, peak)


@triton.jit
def _load_chunk(row, chunk, vocab_size, CHUNK: tl.constexpr):
    """Logits of a chunk, -inf beyond the vocabulary."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))


@triton.jit
def _row_peak(peaks, num_chunks, CHUNKS: tl.constexpr):
    """The greatest logit of a row, NaN if it has one, and the first chunk with it."""
    place = tl.arange(0, CHUNKS)
    values = tl.load(peaks + place, mask=place < num_chunks, other=float("-inf"))
    return _first_greatest(values, place)


@triton.jit
def _first_greatest(values, ids):
    """The greatest value, NaN if one is, and the lowest of the ids that have it, or some id."""
    greatest = tl.max(values, 0)
    first = tl.min(tl.where(values == greatest, ids, 0x7FFFFFFF), 0)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    return tl.where(has_nan, float("nan"), greatest), first


@triton.jit
def _token_weights(logits, peak, temperature, log_min_p):
    """Unnormalized probabilities as integers: int64, 2^44 for the greatest logit of the row."""
    shaped = tl.div_rn(logits - peak, temperature)
    weights = (_exp(shaped) * 17592186044416.0).to(tl.int64)
    return tl.where(shaped < log_min_p, 0, weights)


@triton.jit
def _exp(x):
    """e^x for x <= 0, by the polynomial of csrc/simd.h: the GPU's own instruction is not as exact.
    What is below -31 gets no more than e^-31, which is no weight."""
    x = tl.maximum(x, -31.0)
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    n = (x * 1.44269504 + magic) - magic
    r = n * 2.12194440e-4 + (n * -0.693359375 + x)
    p = r * 1.3981999e-3 + 8.3334519e-3
    p = p * r + 4.1665796e-2
    p = p * r + 1.6666665e-1
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(seed, sample_index, position):
    """``runtime/random.py``'s number for a token: float64, in [0, 1)."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    stream = tl.zeros_like(low)
    first, second, _, _ = tl.philox(seed, low, high, sample_index.to(tl.uint32), stream)
    bits = (first.to(tl.uint64) << 32 | second.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _exceeds(weights, target):
    """Where the running sum exceeds ``target``, which is less than the sum, and the sum before."""
    is_before = tl.cumsum(weights, 0) <= target
    return tl.sum(is_before.to(tl.int32), 0), tl.sum(tl.where(is_before, weights, 0), 0)
