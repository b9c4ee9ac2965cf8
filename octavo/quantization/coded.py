"""Weights as codes with scales, which is what quantized Hugging Face checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn, Protocol

import numpy as np


class Codes(Protocol):
    """The codes of a matrix as they are packed in its file."""

    @property
    def nbytes(self) -> int: ...

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Codes of some rows, unpacked now: uint8 [stop - start, K], to be read only."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix whose values are codes of a few bits, with scales::

        value[r, c] = scales[r, g] * (level(codes[r, c]) - zeros[r, g])

    where ``g`` is ``groups[c]``, or ``c // group_size``, and ``level(q)`` is q itself, or
    ``levels[q]``.

    Attributes:
        format: as people call it, for messages: "gptq", "awq", "compressed-tensors", "nf4".
        shape: (N, K).
        bits: of a code, 2 to 8.
        group_size: inputs of a group; K or more where a row is one group.
        scales: float32 [N or 1, groups or 1].
        zeros: float32 [N or 1, groups or 1], or one number for all.
        levels: float32 [2 ** bits], None where a code is its own level.
        groups: int32 [K], the group of each input, where groups are not runs of inputs.
        nbytes: of all tensors in the file.
    """

    format: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    codes: Codes
    scales: np.ndarray
    zeros: np.ndarray | float
    levels: np.ndarray | None
    groups: np.ndarray | None
    nbytes: int

    is_quantized: ClassVar[bool] = True

    def floats(self) -> NoReturn:
        raise AssertionError(f"{self.format} is quantized")

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` as float32 [rows, K]."""
        stop = self.shape[0] if stop is None else stop
        codes = self.codes.rows(start, stop)
        values = codes.astype(np.float32) if self.levels is None else self.levels[codes]
        with np.errstate(all="ignore"):  # scales may be any numbers, as those of GGUF files
            if isinstance(self.zeros, np.ndarray):
                values -= self._of_inputs(self.zeros, start, stop)
            elif self.zeros:
                values -= np.float32(self.zeros)
            values *= self._of_inputs(self.scales, start, stop)
        return values

    def _of_inputs(self, grid: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The numbers of a grid [N or 1, groups or 1] for some rows: [rows or 1, K or 1]."""
        rows = grid if len(grid) == 1 else grid[start:stop]
        if rows.shape[1] == 1:
            return rows
        groups = self.groups
        if groups is None:
            groups = np.arange(self.shape[1]) // self.group_size
        return rows[:, groups]
