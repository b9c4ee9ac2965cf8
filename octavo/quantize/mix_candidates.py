"""The candidates for a matrix in mixed precision, with their sizes and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import quantize_to_blocks
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.base import MixedWriter


class MixCandidate(Protocol):
    """A type or scheme that a matrix of a mix may get."""

    @property
    def name(self) -> str:
        """The name in reports and records of a choice."""
        ...

    def fits(self, shape: tuple[int, int]) -> bool:
        """True if a matrix of this shape can have it."""
        ...

    def num_bits(self, shape: tuple[int, int]) -> int:
        """Bits of such a matrix in a file, scales and zeros included."""
        ...

    def values(self, weight: Tensor, importance: Tensor | None) -> Tensor:
        """Quantize and dequantize a matrix, float32 [N, K]. ``importance``: E[x^2], [K]."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFTypeCandidate:
    """A tensor type of GGUF files."""

    type: GGMLType

    @property
    def name(self) -> str:
        return self.type.name

    def fits(self, shape: tuple[int, int]) -> bool:
        return shape[1] % block_shape(self.type)[0] == 0

    def num_bits(self, shape: tuple[int, int]) -> int:
        return shape[0] * row_bytes(self.type, shape[1]) * 8

    def values(self, weight: Tensor, importance: Tensor | None) -> Tensor:
        return dequantize(self.type, quantize_to_blocks(self.type, weight, importance))


@dataclass(frozen=True, slots=True)
class SchemeCandidate:
    """Integers in a format of Hugging Face folders, or 16-bit floats if ``scheme`` is None.

    Values are those of rounding to nearest, whatever method finds the codes in the end: others take
    many times as long. By how much GPTQ lowers the error is measured once for a matrix, and not for
    each candidate; see ``measure_sensitivity``.
    """

    scheme: Scheme | None
    writer: MixedWriter

    @property
    def name(self) -> str:
        return f"{16 if self.scheme is None else self.scheme.bits} bits"

    def fits(self, shape: tuple[int, int]) -> bool:
        return True  # the writer has checked all matrices

    def num_bits(self, shape: tuple[int, int]) -> int:
        if self.scheme is None:
            return 16 * shape[0] * shape[1]
        return self.writer.num_bits(shape, self.scheme)

    def values(self, weight: Tensor, importance: Tensor | None) -> Tensor:
        if self.scheme is None:
            return weight.to(torch.bfloat16).float()
        matrix = quantize_to_nearest(weight, self.scheme, search=True, importance=importance)
        return matrix.dequantize()


# In ascending order of size. The second list is for rows that are no multiple of 256. Q4_0 is left
# out: IQ4_NL takes the same bytes, and has less error in every matrix of SmolLM2.
_K_TYPES = (
    *(GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.IQ4_XS, GGMLType.Q4_K, GGMLType.Q5_K),
    *(GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.F16),
)
_TYPES_OF_32 = (
    *(GGMLType.IQ4_NL, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.F16),
)


def gguf_candidates(num_columns: int) -> list[GGUFTypeCandidate]:
    """The types for rows of ``num_columns`` values; F16 alone if no block fits."""
    first = GGUFTypeCandidate(_K_TYPES[0])
    types = _K_TYPES if first.fits((1, num_columns)) else _TYPES_OF_32
    return [each for each in map(GGUFTypeCandidate, types) if each.fits((1, num_columns))]
