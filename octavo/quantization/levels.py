"""What codes stand for that are looked up in a table."""

from __future__ import annotations

import numpy as np

NF4_BLOCK = 64
# The quantiles of a normal distribution, with 0 among them (QLoRA, arXiv 2305.14314, appendix E).
NF4_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


def e4m3_levels() -> np.ndarray:
    """FP8 with 4 bits of exponent and 3 of mantissa, as the OCP has it (``float8_e4m3fn``): float32
    [256], of which two are NaN and none is infinite."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, mantissas, mantissas + 8) * 2.0 ** (
        np.maximum(exponents, 1) - 10.0
    )
    levels = np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)
    levels[codes & 0x7F == 0x7F] = np.nan
    return levels
