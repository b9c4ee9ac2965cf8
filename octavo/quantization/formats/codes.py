"""Codes of a few bits as the formats pack them, and their unpacking.

Most are little-endian streams: the first code is in the lowest bits of the first byte. They differ
in whether a stream runs along the inputs of a row or along the rows, and in where it has gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Wide integers with one code in each byte, so that all are unpacked in a few steps.
_WIDE: dict[int, np.dtype[Any]] = {2: np.dtype("<u4"), 4: np.dtype("<u2")}


def unpack_stream(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpack codes without gaps between them: uint8 [R, bytes] to uint8 [R, count]."""
    if bits == 8:
        return data[:, :count]
    if bits in _WIDE:
        packed, codes_each = data.astype(_WIDE[bits]), 8 // bits
    else:  # eight codes take ``bits`` bytes
        padded = np.pad(data, ((0, 0), (0, -data.shape[1] % bits)))
        packed, codes_each = _big_integers(padded.reshape(-1, bits)).reshape(len(data), -1), 8
    return _spread(packed, bits, codes_each)[:, :count]


def _big_integers(data: np.ndarray) -> np.ndarray:
    """Little-endian integers of up to 8 bytes: uint8 [n, bytes] to uint64 [n]."""
    wide = np.zeros((len(data), 8), dtype=np.uint8)
    wide[:, : data.shape[1]] = data
    return wide.view("<u8")[:, 0]


def _spread(packed: np.ndarray, bits: int, codes_each: int) -> np.ndarray:
    """Spread ``codes_each`` codes of each integer to bytes: [R, n] to uint8 [R, n * codes_each]."""
    mask = (1 << bits) - 1
    spread = packed & packed.dtype.type(mask)
    for i in range(1, codes_each):
        moved = packed << packed.dtype.type((8 - bits) * i)
        moved &= packed.dtype.type(mask << (8 * i))
        spread |= moved
    return spread.view(np.uint8)


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpack ``32 // bits`` codes of each word, whose upper bits are unused: uint32 [R, W] to uint8
    [R, count]."""
    codes = np.empty((*words.shape, 32 // bits), dtype=np.uint8)
    for i in range(32 // bits):
        codes[:, :, i] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)[:, :count]


def as_bytes(words: np.ndarray) -> np.ndarray:
    """View uint32 [R, W] as uint8 [R, 4 W]."""
    return np.ascontiguousarray(words).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class ByteCodes:
    """One code a byte: uint8 [N, K]. The bits of ``flip`` are inverted: 128 turns signed integers
    into codes from 0 on, in the same order."""

    data: np.ndarray
    flip: int = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.data[start:stop] ^ np.uint8(self.flip) if self.flip else self.data[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class RowStreams:
    """A stream for each row: uint8 [N, bytes]."""

    data: np.ndarray
    bits: int
    num_inputs: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_stream(self.data[start:stop], self.bits, self.num_inputs)


@dataclass(frozen=True, slots=True, eq=False)
class RowWords:
    """Words for each row of the matrix, with ``32 // bits`` codes each: uint32 [N, W]."""

    words: np.ndarray
    bits: int
    num_inputs: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_words(self.words[start:stop], self.bits, self.num_inputs)


@dataclass(frozen=True, slots=True, eq=False)
class HighFirstNibbles:
    """Two codes a byte, the first in the upper half: uint8 [N, K / 2]."""

    data: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        wide = self.data[start:stop].astype("<u2")
        return (((wide >> 4) | (wide << 8)) & np.uint16(0x0F0F)).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStreams:
    """A stream of words for each row of the matrix, stored as a column: uint32 [W, N]."""

    words: np.ndarray
    bits: int
    num_inputs: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_stream(as_bytes(self.words[:, start:stop].T), self.bits, self.num_inputs)


# Nibbles of an AWQ word that have the values 0 to 7, in the order of its kernels.
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unpack eight rows of codes from each column of words: uint32 [K, W] to uint8 [8 W, K]."""
    words = np.ascontiguousarray(words.T)
    codes = np.empty((len(words), 8, words.shape[1]), dtype=np.uint8)
    for row, field in enumerate(_AWQ_FIELDS):
        codes[:, row] = (words >> np.uint32(4 * field)) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class AWQCodes:
    """Words of eight rows for each input: uint32 [K, N / 8]."""

    words: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        first = start // 8
        codes = unpack_awq(self.words[:, first : -(-stop // 8)])
        return codes[start - 8 * first : stop - 8 * first]
