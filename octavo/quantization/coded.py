"""Weights of Hugging Face checkpoints as codes of a few bits, with scales.

GPTQ, AWQ, compressed-tensors, FP8, NF4 and MXFP4 pack their bits differently (see ``formats/``),
and all become this form:

    value[r, c] = scales[r, g] * (level(codes[r, c]) - zeros[r, g])

where level(q) is q itself or the q-th entry of a table, and g = groups[c], or c // group_size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np


class Codes(Protocol):
    """The codes of a matrix, unpacked on demand."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Codes of rows ``start`` to ``stop``: uint8 [stop - start, K]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainCodes:
    """Codes that are not packed: uint8 [N, K]."""

    values: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedCodes:
    """Codes with permuted columns: column i is column ``columns[i]`` of ``codes``."""

    codes: Codes
    columns: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.codes.rows(start, stop)[:, self.columns]


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix [N, K] of codes, see the module.

    Args:
        format: name for messages.
        bits: bits of a code, 2 to 8.
        group_size: inputs that share a scale and a zero; K or more for one of each per row.
        scales: float32 [N or 1, number of groups or 1].
        zeros: same shape as the scales, or one number for all.
        nbytes: bytes in its files.
        levels: lookup table float32 [2**bits]; None where codes are their own values.
        groups: group of each input, int32 [K], where groups are not consecutive inputs.
        rounds_activations: the checkpoint was made for 8-bit activations, so that kernels may round
            them.
    """

    format: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    codes: Codes
    scales: np.ndarray
    zeros: np.ndarray | float
    nbytes: int
    levels: np.ndarray | None = None
    groups: np.ndarray | None = None
    rounds_activations: bool = False

    is_quantized = True
    mapped = ()  # rows may be interleaved with others

    @property
    def num_groups(self) -> int:
        if self.groups is not None:
            return int(self.groups.max()) + 1
        return -(-self.shape[1] // self.group_size)

    def select(self, rows: np.ndarray) -> CodedWeight:
        zeros = self.zeros
        return replace(
            self,
            shape=(len(rows), self.shape[1]),
            codes=PlainCodes(self.codes.rows(0, self.shape[0])[rows]),
            scales=_rows_of(self.scales, rows),
            zeros=zeros if isinstance(zeros, float | int) else _rows_of(zeros, rows),
            nbytes=self.nbytes * len(rows) // max(self.shape[0], 1),
        )

    def narrow(self, start: int, stop: int | None, step: int = 1) -> CodedWeight:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        zeros, rows, count = self.zeros, slice(start, stop, step), len(range(start, stop, step))
        return replace(
            self,
            shape=(count, self.shape[1]),
            codes=_Rows(self.codes, start, step),
            scales=_rows_of(self.scales, rows),
            zeros=zeros if isinstance(zeros, float | int) else _rows_of(zeros, rows),
            nbytes=self.nbytes * count // max(self.shape[0], 1),
        )

    def floats(self) -> np.ndarray:
        raise AssertionError(f"{self.format} is quantized")

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` as float32 [rows, K]."""
        part = self.narrow(start, stop)
        codes = part.codes.rows(0, part.shape[0])
        values = codes.astype(np.float32) if self.levels is None else self.levels[codes]
        of = self.groups if self.groups is not None else np.arange(self.shape[1]) // self.group_size
        with np.errstate(all="ignore"):  # scales may be any numbers, as those of GGUF files
            values -= _by_input(np.asarray(part.zeros, np.float32), of)
            values *= _by_input(part.scales, of)
        return values


@dataclass(frozen=True, slots=True)
class _Rows:
    """Every ``step``-th row of codes from the row ``first`` on."""

    codes: Codes
    first: int
    step: int = 1

    def rows(self, start: int, stop: int) -> np.ndarray:
        first, end = (self.first + row * self.step for row in (start, stop))
        return self.codes.rows(first, max(end - self.step + 1, first))[:: self.step]


def _rows_of(table: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    return table if table.shape[0] == 1 else table[rows]


def _by_input(table: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Expand a table by groups to one by inputs; a column that all groups share stays one
    column."""
    return table if table.ndim < 2 or table.shape[1] == 1 else table[:, groups]
