"""Codes of a few bits, packed into words of 32."""

from __future__ import annotations

import numpy as np


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (uint8 [..., n]) one behind the other, the first lowest: int32 [..., words].

    Where ``bits`` do not divide 32 a code may lie in two words. The last word is filled with zeros.
    """
    fields = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    stream = fields.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4")
