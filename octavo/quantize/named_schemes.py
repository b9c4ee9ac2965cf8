"""Quantization schemes by name, and rounding of rows to them.

    int4-g64          integers of 2 to 8 bits, with a float16 scale for 64 neighbours
    int4-g32-asym     the same with a zero point of as many bits
    int4-channel      one scale for a row
    nf4, fp8          as the methods of these names
    Q4_K, IQ4_NL ...  the block types of GGUF files

Grids, tables and blocks are those of quantized models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.quantization.ggml_types import GGMLType, block_shape
from octavo.quantization.gguf_fields import fields_of
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import SEARCHED, quantize_to_blocks
from octavo.quantize.code_tables import TABLES
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.methods import METHODS
from octavo.quantize.scheme import GroupSize, Scheme
from octavo.quantize.writers.bitsandbytes import dequantize_scales, quantize_scales

_BITS = (2, 3, 4, 5, 6, 8)
_TABLES = {name: METHODS[name].fixed for name in ("nf4", "fp8")}

SCHEMES = (
    *(f"int{bits}-{groups}" for groups in ("channel", "g64", "g32-asym") for bits in _BITS),
    *_TABLES,
    *(type.name for type in SEARCHED),
)
"""A selection of schemes of every kind."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Quantized rows of weights; groups of ``width`` columns share a scale, zero and offset::

        value[r, c] = scale[r, g] * (level[r, c] - zero[r, g]) + offset[r, g]        g = c // width

    ``codes``: the stored integers [n, K]. ``levels``: the table entries of the codes, or the codes
    themselves, float32 [n, K]. ``scales``, ``zeros``, ``offsets``: float32 [n, K / width].
    ``values``: float32 [n, K].
    """

    codes: np.ndarray
    levels: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    offsets: np.ndarray
    values: np.ndarray
    width: int


class NamedScheme(Protocol):
    """A scheme that rows of weights can be rounded to."""

    @property
    def block(self) -> int:
        """Number that the length of rows must be a multiple of."""
        ...

    def bits_per_weight(self, num_columns: int) -> float:
        """Bits of a weight in a file, with scales, zeros and offsets."""
        ...

    def round(self, rows: Tensor, search: bool) -> CodedRows:
        """Round rows, float32 [n, K], to nearest. ConfigError if they cannot have the scheme.

        ``search``: search scales of least error, in place of those that hold the largest value.
        """
        ...


def named_scheme(name: str) -> NamedScheme:
    """Return the scheme of a name. ConfigError if there is none."""
    fixed = _TABLES.get(name.lower())
    if fixed is not None:
        return _GridScheme(fixed)
    type = GGMLType.__members__.get(name.upper())
    if type is not None and type in SEARCHED:
        return _GGUFScheme(type)
    match = re.fullmatch(r"int([2-8])-(?:g([1-9]\d{0,5})|channel)(-asym)?", name.lower())
    if match is None:
        raise ConfigError(
            f"no scheme {name!r}: give int2 to int8 with -gN or -channel, and -asym for zeros "
            f"(int4-g64, int4-g32-asym), {', '.join(_TABLES)}, or a type of GGUF files: "
            + ", ".join(type.name for type in SEARCHED)
        )
    group_size: GroupSize = int(match[2]) if match[2] else "channel"
    return _GridScheme(Scheme(int(match[1]), group_size, symmetric=match[3] is None))


@dataclass(frozen=True, slots=True)
class _GridScheme:
    """A scheme of integers or of codes of a table, with a scale for each group of a row."""

    scheme: Scheme

    @property
    def block(self) -> int:
        size = self.scheme.group_size
        return size if isinstance(size, int) else 1

    def bits_per_weight(self, num_columns: int) -> float:
        scheme = self.scheme
        if scheme.table == "nf4":  # scales of a byte, and for 256 of them a float32
            of_group = 8 + 32 / 256
        elif scheme.table is not None:
            of_group = 32
        else:
            of_group = 16 + (0 if scheme.symmetric else scheme.bits)
        return scheme.bits + of_group / scheme.group_width(num_columns)

    def round(self, rows: Tensor, search: bool) -> CodedRows:
        scheme = self.scheme
        matrix = quantize_to_nearest(rows, scheme, search=search)
        codes, scales, zeros = (
            each.numpy() for each in (matrix.codes, matrix.scales, matrix.zeros)
        )
        levels = codes.astype(np.float32) if scheme.table is None else TABLES[scheme.table][codes]
        if scheme.table == "nf4":  # whose scales are quantized too
            stored = dequantize_scales(*quantize_scales(scales.reshape(-1)))
            scales = stored.reshape(scales.shape)
        width = scheme.group_width(rows.shape[1])
        of_columns = (each.repeat(width, axis=1) for each in (scales, zeros))
        values = next(of_columns) * (levels - next(of_columns))
        return CodedRows(codes, levels, scales, zeros, np.zeros_like(scales), values, width)


@dataclass(frozen=True, slots=True)
class _GGUFScheme:
    """A block type of GGUF files; its scales are searched always, or ggml's own."""

    type: GGMLType

    @property
    def block(self) -> int:
        return block_shape(self.type)[0]

    def bits_per_weight(self, num_columns: int) -> float:
        values, size = block_shape(self.type)
        return 8 * size / values

    def round(self, rows: Tensor, search: bool) -> CodedRows:
        if rows.shape[1] % self.block:
            raise ConfigError(
                f"rows of {rows.shape[1]} values cannot be {self.type.name}, which has blocks of "
                f"{self.block}"
            )
        try:
            data = quantize_to_blocks(self.type, rows)
        except ValueError as error:  # a value that float16 has not
            raise ConfigError(str(error)) from None
        levels, scales, offsets, width = fields_of(self.type, data)
        return CodedRows(
            levels.numpy().astype(np.int32),
            levels.numpy(),
            scales.numpy(),
            np.zeros_like(scales.numpy()),
            offsets.numpy(),
            dequantize(self.type, data).numpy(),
            width,
        )
