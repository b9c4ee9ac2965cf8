"""Codes of a few bits in the ways that formats pack them, and how they are unpacked.

All of them are little-endian streams: the first code is in the lowest bits of the first byte. They
differ in what a stream runs along (the inputs of a row, or the rows) and in where it leaves gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def unpack_stream(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes without gaps between them: uint8 [R, bytes] to uint8 [R, count]."""
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields = (data[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
        return fields.reshape(len(data), -1)[:, :count]
    stream = np.unpackbits(data, axis=1, count=count * bits, bitorder="little")
    return np.packbits(stream.reshape(len(data), count, bits), axis=2, bitorder="little")[..., 0]


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """``32 // bits`` codes in each word, the bits above them unused: uint32 [R, W] to uint8
    [R, count]."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = (words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(len(words), -1)[:, :count]


def as_bytes(words: np.ndarray) -> np.ndarray:
    """uint32 [R, W] as uint8 [R, 4 W]."""
    return np.ascontiguousarray(words).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class ByteCodes:
    """One code a byte: uint8 [N, K]. ``flip`` is added modulo 256: 128 makes signed integers codes
    from 0, in their order."""

    data: np.ndarray
    flip: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.data[start:stop] ^ np.uint8(self.flip) if self.flip else self.data[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class RowStreams:
    """A stream for each row: uint8 [N, bytes]."""

    data: np.ndarray
    bits: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_stream(self.data[start:stop], self.bits, self.num_inputs)


@dataclass(frozen=True, slots=True, eq=False)
class RowWords:
    """A row of words for each row of the matrix, with ``32 // bits`` codes each: uint32 [N, W]."""

    words: np.ndarray
    bits: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_words(self.words[start:stop], self.bits, self.num_inputs)


@dataclass(frozen=True, slots=True, eq=False)
class HighFirstNibbles:
    """Two codes a byte, the first in the upper half: uint8 [N, K / 2]."""

    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        data = self.data[start:stop]
        return unpack_stream((data >> 4) | (data << 4), 4, 2 * data.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStreams:
    """A stream of words for each row of the matrix, which lies as a column: uint32 [W, N]."""

    words: np.ndarray
    bits: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        return unpack_stream(as_bytes(self.words[:, start:stop].T), self.bits, self.num_inputs)


# Where AWQ has the values 0 to 7 of a word, which its kernels want in this order.
_AWQ_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Eight codes a word, in the order of AWQ's kernels: uint32 [R, W] to uint8 [R, 8 W]."""
    fields = unpack_stream(as_bytes(words), 4, 8 * words.shape[1])
    return fields.reshape(len(words), -1, 8)[:, :, _AWQ_FIELDS].reshape(len(words), -1)


@dataclass(frozen=True, slots=True, eq=False)
class AWQCodes:
    """Words of eight rows for each input: uint32 [K, N / 8]."""

    words: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        first = start // 8
        columns = unpack_awq(self.words[:, first : -(-stop // 8)])
        return np.ascontiguousarray(columns[:, start - 8 * first : stop - 8 * first].T)
