"""Lookup tables of codes: float32 [2 ** bits], by code.

Sources of floats of 4 and 8 bits: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and
5.4; OCP 8-bit Floating Point Specification 1.0. All of their values are exact in float32.
"""

from __future__ import annotations

import numpy as np


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Values of all codes, sign | exponent | mantissa, with subnormals and without specials."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    magnitude = np.ldexp(np.where(exponent, 1 + fraction, fraction), np.maximum(exponent, 1) - bias)
    negative = code >> (exponent_bits + mantissa_bits)
    return np.where(negative, -magnitude, magnitude).astype(np.float32)


E2M1 = _table(2, 1, bias=1)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same less than zero."""

E4M3 = _table(4, 3, bias=7)
"""The variant without infinities (``float8_e4m3fn``): to 448, and one NaN of each sign."""
E4M3[[0x7F, 0xFF]] = np.nan

E5M2 = _table(5, 2, bias=15)
"""``float8_e5m2``: to 57,344, and infinities and NaN like those of larger floats."""
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[*range(0x7D, 0x80), *range(0xFD, 0x100)]] = np.nan

E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""Powers of two, for scales."""

FP8_BLOCK = 128  # rows and columns of a block
NF4_BLOCK = 64
NF4_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The quantiles of a normal distribution, with 0 among them (QLoRA, arXiv 2305.14314, app. E)."""

FP4_LEVELS = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4_LEVELS = np.concatenate([FP4_LEVELS, -FP4_LEVELS])
"""The floats of 4 bits of bitsandbytes, whose largest is 1 (``create_fp4_map`` of its 0.50)."""
