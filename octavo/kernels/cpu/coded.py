"""Conversion of coded weights to native formats: integers of 2 to 8 bits if possible.

    codes with one integer zero      W2S to W8S: the same integers, shifted to the format's zero
    codes with other zeros           W2A to W8A: d * q + m with m = -scale * zero
    FP4 (E2M1), as of MXFP4, NVFP4   W4F: the codes
    other lookup tables              NF4, FP4, E4M3: the codes with the same scales; or integers,
                                     if all levels are whole numbers
    all others                       float16, or float32 if they are too large or small for it

If groups are scattered over the inputs, as those of GPTQ with ``desc_act``, the columns are packed
group by group, and the kernels permute activations to match.

Scales of integers are float16. Most files have them so; others are rounded, unless that changes one
of them by more than 2**-10 of it, as for scales below 1e-5, and by more than 2**-16 of the largest
of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import CODE_FORMATS, INTEGER_FORMATS
from octavo.quantization.coded import CodedWeight, ReorderedCodes
from octavo.quantization.levels import E2M1, E4M3, FP4_LEVELS, NF4_LEVELS

_SYMMETRIC = {
    2: abi.OCT_W2S,
    3: abi.OCT_W3S,
    4: abi.OCT_W4S,
    5: abi.OCT_W5S,
    8: abi.OCT_W8S,
}
_ASYMMETRIC = {
    2: abi.OCT_W2A,
    3: abi.OCT_W3A,
    4: abi.OCT_W4A,
    5: abi.OCT_W5A,
    8: abi.OCT_W8A,
}
_CODES = {abi.OCT_NF4: NF4_LEVELS, abi.OCT_FP4: FP4_LEVELS, abi.OCT_E4M3: E4M3}
_LARGEST_HALF = 65504.0
_SMALL = 2.0**-6  # if a matrix's largest is below it, float16 has few bits for the others
_ROUNDING, _ROUNDING_IN_ROW = 2.0**-10, 2.0**-16


class Packing(NamedTuple):
    """Packed form of a coded weight: the format, the inputs of a group (0: floats), and whether
    columns are permuted."""

    format: int
    group: int
    is_reordered: bool


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes as integers of a packed format, of ``bits`` bits each.

    A code is stored as ``moved[code]``, in units of d = scale * ``step``; the mins of asymmetric
    formats are -scale * zero.
    """

    format: int
    group: int
    moved: np.ndarray  # [2 ** bits of a code]
    step: float

    def read(self, weight: CodedWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Read a weight: (q uint8 [n, k], d float16 [n, groups], m float16 [n, groups] or None)."""
        n, k = weight.shape
        of = np.arange(0, k, self.group) // weight.group_size

        def by_group(table: np.ndarray) -> np.ndarray:
            return np.broadcast_to(table, (n, weight.num_groups))[:, of]

        q = self.moved.astype(np.uint8)[weight.codes.rows(0, n)]
        d = (by_group(weight.scales) * np.float32(self.step)).astype(np.float16)
        if not INTEGER_FORMATS[self.format].has_min:
            return q, d, None
        return q, d, by_group(-weight.scales * weight.zeros).astype(np.float16)


def packing_of(weight: CodedWeight) -> Packing:
    """Choose the packed form of a weight, without reading its codes."""
    ordered, is_reordered = in_runs(weight), weight.groups is not None
    if (format := code_format(ordered)) is not None:
        return Packing(format, CODE_FORMATS[format][1], is_reordered)
    if (integers := as_integers(ordered)) is not None:
        return Packing(integers.format, integers.group, is_reordered)
    return Packing(dense_format(weight), 0, False)


def by_groups(weight: CodedWeight) -> np.ndarray:
    """Inputs of a weight with scattered groups, sorted by group: int [K]."""
    assert weight.groups is not None
    return np.argsort(weight.groups, kind="stable")


def in_runs(weight: CodedWeight) -> CodedWeight:
    """The weight with its columns sorted by group (``by_groups``), so that groups are consecutive.

    Returns the weight itself if its groups are consecutive, or are not all of ``group_size``
    inputs.
    """
    if weight.groups is None:
        return weight
    columns = by_groups(weight)
    if not np.array_equal(weight.groups[columns], np.arange(len(columns)) // weight.group_size):
        return weight
    return replace(weight, codes=ReorderedCodes(weight.codes, columns), groups=None)


@np.errstate(all="ignore")  # scales may be any numbers
def as_integers(weight: CodedWeight) -> Integers | None:
    """The packed integer format with the fewest bits that holds a weight; None if there is none."""
    if weight.groups is not None:
        return None
    for integers in _candidates(weight):
        traits = INTEGER_FORMATS[integers.format]
        fits = integers.moved.min() >= 0 and integers.moved.max() < 1 << traits.bits
        has_mins = not traits.has_min or _are_halves(weight.scales * weight.zeros)
        if fits and has_mins and _are_halves(weight.scales * integers.step):
            return integers
    return None


def integers_in(weight: CodedWeight, format: int) -> Integers:
    """The conversion to ``format``, which ``as_integers`` chose, for some rows of a weight."""
    return next(integers for integers in _candidates(weight) if integers.format == format)


def code_format(weight: CodedWeight) -> int | None:
    """The format that stores the weight's own codes of floats; None if there is none."""
    if weight.levels is None or weight.groups is not None or np.any(weight.zeros):
        return None
    for format, levels in _CODES.items():
        _, group = CODE_FORMATS[format]
        in_groups = weight.group_size % group == 0 or weight.group_size >= weight.shape[1]
        if in_groups and np.array_equal(weight.levels, levels, equal_nan=True):
            return format
    return None


def read_codes(weight: CodedWeight, format: int) -> tuple[np.ndarray, np.ndarray]:
    """Read (codes uint8 [n, k], scales float32 [n, groups]); UnsupportedModelError if some are
    NaN."""
    n, k = weight.shape
    codes = weight.codes.rows(0, n)
    if format == abi.OCT_E4M3 and ((codes & 0x7F) == 0x7F).any():
        raise UnsupportedModelError("the native kernels cannot run FP8 weights that are NaN")
    _, group = CODE_FORMATS[format]
    of = np.arange(0, k, group) // weight.group_size
    scales = np.broadcast_to(weight.scales, (n, weight.num_groups))[:, of]
    return codes, scales.astype(np.float32)


@np.errstate(all="ignore")
def dense_format(weight: CodedWeight) -> int:
    """The float format of a weight that is dequantized."""
    levels = np.array([0.0, 2**weight.bits - 1]) if weight.levels is None else weight.levels
    levels = levels[np.isfinite(levels)]
    farthest = max(
        np.abs(levels.max() - weight.zeros).max(), np.abs(levels.min() - weight.zeros).max()
    )
    largest = float(np.abs(weight.scales).max(initial=0.0) * farthest)
    return abi.OCT_F16 if _SMALL <= largest <= _LARGEST_HALF else abi.OCT_F32


def _candidates(weight: CodedWeight) -> Iterator[Integers]:
    if _is_e2m1(weight):
        yield from _in_groups(weight, abi.OCT_W4F, np.arange(16), step=0.5)
    levels = np.arange(1 << weight.bits) if weight.levels is None else weight.levels
    if not (levels == np.round(levels)).all():
        return
    levels = levels.astype(np.int64)
    zeros = np.unique(weight.zeros)
    if len(zeros) == 1 and zeros[0] == round(zeros[0]):
        for bits, format in _SYMMETRIC.items():
            middle = 1 << (bits - 1)
            yield from _in_groups(weight, format, levels - int(zeros[0]) + middle)
    for format in _ASYMMETRIC.values():
        yield from _in_groups(weight, format, levels)


def _is_e2m1(weight: CodedWeight) -> bool:
    return (
        weight.levels is not None
        and np.array_equal(weight.levels, E2M1)
        and not np.any(weight.zeros)
    )


def _in_groups(
    weight: CodedWeight, format: int, moved: np.ndarray, step: float = 1.0
) -> Iterator[Integers]:
    """The format with its longest groups that do not cross the ends of the weight's own groups."""
    k, own = weight.shape[1], weight.group_size
    possible = INTEGER_FORMATS[format].groups
    fitting = [group for group in possible if own % group == 0]
    if own >= k:  # one group for a row: packed groups may reach beyond it, but that takes memory
        fitting = [group for group in possible if k % group == 0] or [min(possible)]
    if fitting:
        yield Integers(format, max(fitting), moved, step)


@np.errstate(all="ignore")
def _are_halves(scales: np.ndarray) -> bool:
    """True if float16 approximates these numbers closely."""
    if not np.isfinite(scales).all() or np.abs(scales).max(initial=0.0) > _LARGEST_HALF:
        return False
    error = np.abs(scales.astype(np.float16).astype(np.float32) - scales)
    largest = np.abs(np.atleast_2d(scales)).max(axis=-1, keepdims=True)
    allowed = np.maximum(np.abs(scales) * _ROUNDING, largest * _ROUNDING_IN_ROW)
    return bool((error <= allowed).all())
