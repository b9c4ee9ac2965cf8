"""Floats of 4 and 8 bits, as tables of their values: float32 [2 ** bits], by code.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4; OCP 8-bit Floating
Point Specification 1.0. Every value is exact in float32.
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

E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""Powers of two, for scales."""
