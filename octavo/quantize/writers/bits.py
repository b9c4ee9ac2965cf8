"""Packs codes of a few bits into 32-bit words."""

from __future__ import annotations

import numpy as np


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes (uint8 [..., n]) in order from the lowest bit on: int32 [..., words].

    If ``bits`` do not divide 32, a code may lie in two words. The last word is filled with zeros.
    """
    fields = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    stream = fields.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4")
