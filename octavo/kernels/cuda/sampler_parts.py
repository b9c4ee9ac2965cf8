"""Functions that the sampler's kernels share: records, logits in chunks, weights of tokens.

Masked logits become -inf when they are loaded, as those beyond the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda import sampling
from octavo.kernels.cuda.sampling import Asked, SamplingTensors

CHUNK = 2048  # tokens, sixteen for each thread
WEIGHT_ONE = tl.constexpr(2.0**44)

_RECORD_WORDS = tl.constexpr(sampling.RECORD_WORDS)
_MASK_ROW = tl.constexpr(sampling.MASK_ROW)
_SEED = tl.constexpr(sampling.SEED)
_SAMPLE_INDEX = tl.constexpr(sampling.SAMPLE_INDEX)
_POSITION = tl.constexpr(sampling.POSITION)


class LogitsOf(NamedTuple):
    """First arguments of the kernels: logits [R, V], and the tensors that they are read with."""

    logits: Tensor
    stride: int  # of a row
    vocab_size: int
    num_chunks: int
    records: Tensor
    masks: Tensor | None
    mask_stride: int

    @classmethod
    def rows(cls, logits: Tensor, rows: SamplingTensors, asked: Asked) -> LogitsOf:
        num_chunks = triton.cdiv(logits.shape[1], CHUNK)
        masks = rows.masks if asked.masks else None
        mask_stride = 0 if masks is None else masks.stride(0)
        shape = logits.stride(0), logits.shape[1], num_chunks
        return cls(logits, *shape, rows.records, masks, mask_stride)

    def unmasked(self) -> LogitsOf:
        return self._replace(masks=None, mask_stride=0)


def block_sizes(vocab_size: int) -> dict[str, int]:
    """Last arguments of the kernels."""
    num_chunks = triton.next_power_of_2(triton.cdiv(vocab_size, CHUNK))
    return {"CHUNK": CHUNK, "CHUNKS": num_chunks, "num_warps": 4}


@triton.jit
def int_of(records, row, WORD: tl.constexpr):
    """A field of a row's record: int32."""
    return tl.load(records + row * _RECORD_WORDS + WORD)


@triton.jit
def float_of(records, row, WORD: tl.constexpr):
    """A field of a row's record: float32."""
    return int_of(records, row, WORD).to(tl.float32, bitcast=True)


@triton.jit
def double_of(records, row, WORD: tl.constexpr):
    """A field of a row's record: float64."""
    return _two_words(records, row, WORD).to(tl.float64, bitcast=True)


@triton.jit
def _two_words(records, row, WORD: tl.constexpr):
    low, high = int_of(records, row, WORD), int_of(records, row, WORD + 1)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def load_chunk(logits, stride, vocab_size, records, masks, mask_stride, row, tokens):
    """Logits of some tokens of a row. ``masks`` may be None."""
    exists = tokens < vocab_size
    values = tl.load(logits + row * stride + tokens, mask=exists, other=float("-inf"))
    if masks is not None:
        mask_row = int_of(records, row, _MASK_ROW)
        own = masks + tl.maximum(mask_row, 0).to(tl.int64) * mask_stride
        words = tl.load(own + (tokens >> 5), mask=exists, other=0)
        allowed = tl.where((words >> (tokens & 31)) & 1 != 0, values, float("-inf"))
        values = tl.where(mask_row >= 0, allowed, values)
    return values


@triton.jit
def row_peak(peaks, row, num_chunks, CHUNKS: tl.constexpr):
    """The greatest logit of a row, NaN if it has one, and the first chunk with it."""
    place = tl.arange(0, CHUNKS)
    own = peaks + row * num_chunks + place
    values = tl.load(own, mask=place < num_chunks, other=float("-inf"))
    return first_greatest(values, place)


@triton.jit
def first_greatest(values, ids):
    """The greatest value, NaN if there is one, and the lowest of its ids (any id for NaN)."""
    is_nan = values != values
    greatest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    first = tl.min(tl.where(values == greatest, ids, 0x7FFFFFFF), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    return tl.where(has_nan, float("nan"), greatest), first


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def shape(logits, peak, temperature, log_min_p):
    """Shape logits by temperature and min_p: at most 0, and -inf for tokens that min_p excludes."""
    shaped = tl.div_rn(logits - peak, tl.zeros_like(logits) + temperature)
    return tl.where(shaped < log_min_p, float("-inf"), shaped)


@triton.jit
def weights_of(shaped):
    """Unnormalized probabilities as integers: int64, WEIGHT_ONE for 0."""
    return (_exp(shaped) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _exp(x):
    """e^x for x <= 0, by the polynomial of csrc/simd.h: the GPU's own instruction is less exact.

    Below -31 the result is e^-31, which is no weight.
    """
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
def total_of(weights, row, num_chunks, CHUNKS: tl.constexpr):
    """The sum of a row's weights, and those of its chunks."""
    place = tl.arange(0, CHUNKS)
    of_chunks = tl.load(weights + row * num_chunks + place, mask=place < num_chunks, other=0)
    return tl.sum(of_chunks, 0), of_chunks


@triton.jit
def target_of(records, row, total):
    """The row's random number, scaled to a sum of weights: less than that."""
    number = _uniform(
        _two_words(records, row, _SEED),
        int_of(records, row, _SAMPLE_INDEX),
        int_of(records, row, _POSITION),
    )
    return (number * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _uniform(seed, sample_index, position):
    """The random number of a token, as in ``runtime/random.py``: float64, in [0, 1)."""
    low = position.to(tl.uint32)
    nothing = tl.zeros_like(low)
    first, second, _, _ = tl.philox(seed, low, nothing, sample_index.to(tl.uint32), nothing)
    bits = (first.to(tl.uint64) << 32 | second.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def exceeds(weights, target):
    """Index at which the running sum exceeds ``target``, which is less than the sum, and the sum
    before."""
    is_before = tl.cumsum(weights, 0) <= target
    return tl.sum(is_before.to(tl.int32), 0), tl.sum(tl.where(is_before, weights, 0), 0)


@triton.jit
def remember(last_tokens, slots, row, token):
    """Store a row's token in its slot, if it has one."""
    slot = tl.load(slots + row)
    tl.store(last_tokens + slot, token, mask=slot >= 0)
