"""Formats of the KV cache in kernels: floats, or codes of a byte with scales.

Codes have the same bits as those of ``octavo/kernels/kv_stores.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.kernels.kv_stores import FloatCodec, Fp8Codec, HadamardCodec, Int8Codec, KVStore


def kind_of(store: KVStore) -> str:
    """Name of a store's format in kernels: "float", "s8" (signed integers) or "fp8". None is the
    name of one of Triton's types, which ``compile_ahead.py`` could not tell from it."""
    codec = store.codec.codec if isinstance(store.codec, HadamardCodec) else store.codec
    for kind, type_ in {"float": FloatCodec, "s8": Int8Codec, "fp8": Fp8Codec}.items():
        if isinstance(codec, type_):
            return kind
    raise ConfigError(
        f"GPU kernels do not read a KV cache of {type(codec).__name__}; "
        "set --kv-cache-dtype to auto, int8 or fp8"
    )


def pointers(store: KVStore) -> tuple[Tensor, Tensor | None]:
    """The floats or codes [blocks, block_size, Hk, D], and float32 scales [blocks, block_size, Hk]
    or None."""
    values, *scales = store.parts
    return values, scales[0] if scales else None


@triton.jit
def code_values(codes, dtype: tl.constexpr, KIND: tl.constexpr):
    """Values of codes without their scales: exact in any float of 16 bits.

    They become floats by their bits: GPUs have few units that convert integers.
    """
    if KIND == "s8":
        # 2^23 + code has the code in its last bits.
        bits = codes.to(tl.uint32) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)).to(dtype)
    if KIND == "fp8":
        # The bits of e4m3 are those of a float32 with another bias, 127 in place of 7.
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    return codes.to(dtype)


@triton.jit
def encoded(x, KIND: tl.constexpr):
    """Codes [N, D], and scales [N], of vectors x in float32; a vector that is not finite has such a
    scale."""
    top = tl.max(tl.abs(x), axis=1) + tl.sum(x * 0.0, axis=1)
    if KIND == "s8":
        units = x * _quotient(127.0, top)[:, None]
        # Adding and subtracting 1.5 * 2^23 rounds to nearest even.
        whole = (units + 12582912.0) - 12582912.0
        return (whole + 128.0).to(tl.uint8), tl.div_rn(top, tl.zeros_like(top) + 127.0)
    codes, scale, least = _fp8_of(x, top, 448.0)
    codes, scale, least = _better(x, top, 288.0, codes, scale, least)
    codes, scale, least = _better(x, top, 256.0, codes, scale, least)
    codes, scale, least = _better(x, top, 240.0, codes, scale, least)
    return codes, scale


@triton.jit
def e4m3(x):
    """Round float32 within e4m3's range to nearest even: the bits, computed by hand, as GPUs before
    sm_89 have no instruction for it."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6, codes count units of 2^-9, which are the last bit of 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(bits < (127 - 6) << 23, small, normal)).to(tl.uint8)


@triton.jit
def hadamard_rotated(x, HEAD_DIM: tl.constexpr):
    """Compute ``kv_stores.hadamard_rotate`` in its order of sums: vectors x [N, WIDTH], zeros
    beyond D."""
    TOGETHER: tl.constexpr = HEAD_DIM & -HEAD_DIM
    APART: tl.constexpr = min(TOGETHER, 16)
    shape: tl.constexpr = x.shape
    place = tl.arange(0, APART)
    terms = tl.reshape(x, [x.numel // APART, APART])
    total = tl.zeros_like(terms)
    for i in tl.static_range(APART):
        term = tl.sum(tl.where(place[None, :] == i, terms, 0.0), axis=1)
        total += term[:, None] * _hadamard_signs(place, i)[None, :]
    for doubling in tl.static_range(4, 8):
        if 1 << doubling < TOGETHER:
            pairs = tl.reshape(total, [x.numel >> (doubling + 1), 2, 1 << doubling])
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            total = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
    return tl.reshape(total, shape)


@triton.jit
def _hadamard_signs(place, i: tl.constexpr):
    """1 where an even number of bits are common, else -1."""
    common = place & i
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32)


@triton.jit
def _better(x, top, to, codes, scale, least):
    """The codes with less error: those so far, or those that map the largest magnitude to
    ``to``."""
    other_codes, other_scale, error = _fp8_of(x, top, to)
    is_better = error < least
    codes = tl.where(is_better[:, None], other_codes, codes)
    return codes, tl.where(is_better, other_scale, scale), tl.where(is_better, error, least)


@triton.jit
def _fp8_of(x, top, to):
    codes = e4m3(x * _quotient(to, top)[:, None])
    scale = tl.div_rn(top, tl.zeros_like(top) + to)
    error = (scale[:, None] * code_values(codes, tl.float32, "fp8") - x).to(tl.float64)
    return codes, scale, tl.sum(error * error, axis=1)


@triton.jit
def _quotient(of, by):
    """``of / by``, and 0 where ``by`` is too small to divide by."""
    is_large = by > 1e-30
    by = tl.where(is_large, by, 1.0)
    return tl.where(is_large, tl.div_rn(tl.zeros_like(by) + of, by), 0.0)
