"""Quantization of float32 rows to the types of GGUF files: the inverse of gguf_formats.py.

A value is approximated by one of these formulas; types differ in the number of levels ``L`` or
``q``::

    Q4_0 Q5_0 Q8_0 IQ4_NL    d * L                blocks of 32 values
    Q4_1 Q5_1                d * q + m            blocks of 32 values
    Q3_K Q6_K IQ4_XS         d * s * L            super-blocks of 256, ``s`` for 16 or 32
    Q2_K Q4_K Q5_K           d * s * q - e * t    super-blocks of 256, ``s`` and ``t`` likewise

Without importance Q4_0 to Q8_0 have the bytes that ggml gives them (``ggml-quants.c``). All other
scales are found by search (gguf_search.py), which minimizes the sum of ``w * error^2`` with

    w = importance * sqrt(2 * mean(x^2) + x^2)

The mean is over the block or super-block, and the importance is 1 if none is given. Importance is
the mean square of the inputs of a column, so that the sum estimates the squared error of the matrix
product. The root, which is ggml's, gives larger values more weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.quantization import gguf_blocks as pack
from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_formats import FLOAT_DTYPES, IQ4_VALUES
from octavo.quantization.gguf_search import (
    FIXED,
    IntegerLevels,
    Levels,
    TableLevels,
    extreme,
    fit_affine,
    fit_symmetric,
    quotient,
    total,
)

_CHUNK_VALUES = 1 << 17  # for which the temporaries of a search fit a core's cache
_LARGEST = 65504.0  # of float16
_LEAST_IMPORTANCE = 1e-4  # of the mean: an input that was always 0 in calibration may not always be


@dataclass(frozen=True)
class Symmetric:
    """Format ``d * s * L``: the ranges of ``L`` and ``s``, the values that share an ``s``, and the
    function that packs a block."""

    sub_block: int
    levels: Levels
    scales: IntegerLevels
    pack: Callable[..., Tensor]  # of d, s, q; or of d, q


@dataclass(frozen=True)
class Affine:
    """Format ``d * s * q - e * t``, or ``d * q + m``: fields as in ``Symmetric``."""

    sub_block: int
    levels: IntegerLevels
    scales: IntegerLevels
    pack: Callable[..., Tensor]  # of d, e, s, t, q; or of d, m, q


_IQ4 = TableLevels(IQ4_VALUES)
_SIX_BITS, _SIGNED_SIX_BITS = IntegerLevels(0, 63), IntegerLevels(-32, 31)

SEARCHED: dict[GGMLType, Symmetric | Affine] = {
    GGMLType.Q4_0: Symmetric(32, IntegerLevels(-8, 7), FIXED, pack.pack_q4_0),
    GGMLType.Q4_1: Affine(32, IntegerLevels(0, 15), FIXED, pack.pack_q4_1),
    GGMLType.Q5_0: Symmetric(32, IntegerLevels(-16, 15), FIXED, pack.pack_q5_0),
    GGMLType.Q5_1: Affine(32, IntegerLevels(0, 31), FIXED, pack.pack_q5_1),
    GGMLType.Q8_0: Symmetric(32, IntegerLevels(-127, 127), FIXED, pack.pack_q8_0),
    GGMLType.Q2_K: Affine(16, IntegerLevels(0, 3), IntegerLevels(0, 15), pack.pack_q2_k),
    GGMLType.Q3_K: Symmetric(16, IntegerLevels(-4, 3), _SIGNED_SIX_BITS, pack.pack_q3_k),
    GGMLType.Q4_K: Affine(32, IntegerLevels(0, 15), _SIX_BITS, pack.pack_q4_k),
    GGMLType.Q5_K: Affine(32, IntegerLevels(0, 31), _SIX_BITS, pack.pack_q5_k),
    GGMLType.Q6_K: Symmetric(16, IntegerLevels(-32, 31), IntegerLevels(-128, 127), pack.pack_q6_k),
    GGMLType.IQ4_NL: Symmetric(32, _IQ4, FIXED, pack.pack_iq4_nl),
    GGMLType.IQ4_XS: Symmetric(32, _IQ4, _SIGNED_SIX_BITS, pack.pack_iq4_xs),
}
"""The format of a block, for each type that has blocks."""


def quantize_to_blocks(type: GGMLType, rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize rows to a type of GGUF files.

    Args:
        rows: float32 [n, K]; K is a multiple of the type's block.
        importance: float32 [K], not negative: the mean square of the inputs of each column (a
            column of llama.cpp's "imatrix"). Only ratios matter. All types but F32, F16 and BF16
            use it.

    Returns:
        uint8 [n, row_bytes(type, K)] on the device of ``rows``. A row has the same bytes in any
        call and, on a CPU, on any machine.

    Raises:
        ValueError: a value is not finite, or is beyond float16 where the type has float16 numbers;
            K or the importance does not fit; or octavo does not write the type.
    """
    if type not in QUANTIZABLE:
        raise ValueError(
            f"octavo cannot quantize to {type.name}; choose one of "
            + ", ".join(known.name for known in QUANTIZABLE)
        )
    assert rows.dtype == torch.float32 and rows.ndim == 2, (rows.dtype, rows.shape)
    data = torch.empty(
        rows.shape[0], row_bytes(type, rows.shape[1]), dtype=torch.uint8, device=rows.device
    )
    _check_rows(type, rows)
    if importance is not None:
        importance = _relative(importance, rows.shape[1])
    step = max(1, _CHUNK_VALUES // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        data[start : start + step] = _quantize(type, chunk, importance).view(len(chunk), -1)
    return data


def _check_rows(type: GGMLType, rows: Tensor) -> None:
    limit = torch.inf if type in (GGMLType.F32, GGMLType.BF16) else _LARGEST
    if not rows.numel():
        return
    low, high = rows.aminmax(dim=1)  # NaN if there is one
    largest = torch.maximum(-low, high)
    bad = (~(largest.isfinite() & (largest <= limit))).nonzero()
    if bad.numel():
        row = int(bad[0])
        reason = (
            f"has a value over {limit:.0f}, the largest of float16"
            if largest[row].isfinite()
            else "has a value that is not finite"
        )
        raise ValueError(f"row {row} {reason}, and cannot be quantized to {type.name}")


def _relative(importance: Tensor, columns: int) -> Tensor:
    """Scale importance to a mean of about 1, without zeros."""
    if importance.shape != (columns,):
        raise ValueError(
            f"importance has the shape {tuple(importance.shape)}, but rows have {columns} values"
        )
    if not bool((importance.isfinite() & (importance >= 0)).all()):
        raise ValueError("importance has a value that is negative or not finite")
    mean = importance.double().mean()
    if mean == 0:
        return torch.ones_like(importance)
    return (importance / mean).float().clamp_(min=_LEAST_IMPORTANCE)


def _quantize(type: GGMLType, rows: Tensor, importance: Tensor | None) -> Tensor:
    """Quantize rows to bytes, in any shape."""
    if type in FLOAT_DTYPES:
        return rows.to(FLOAT_DTYPES[type]).view(torch.uint8)
    values, _ = block_shape(type)
    if importance is None and type in _LIKE_GGML:
        return _LIKE_GGML[type](rows.reshape(-1, values).T.contiguous())
    format = SEARCHED[type]
    x = _values_first(rows, values, format.sub_block)
    weights = x.square()
    weights = weights.add_(total(total(weights)) * (2 / values)).sqrt_()
    if importance is not None:
        weights.mul_(_values_first(importance.expand_as(rows), values, format.sub_block))
    if isinstance(format, Symmetric):
        d, s, levels = fit_symmetric(x, weights, format.levels, format.scales)
        integers = () if format.scales == FIXED else (s.T,)
        return format.pack(d, *integers, _blocks_first(levels))
    d, e, s, t, q = fit_affine(x, weights, format.levels, format.scales)
    if format.scales == FIXED:
        return format.pack(d, -e, _blocks_first(q))
    return format.pack(d, e, s.T, t.T, _blocks_first(q))


def _values_first(rows: Tensor, values: int, sub_block: int) -> Tensor:
    """[rows, columns] -> [values of a sub-block, sub-blocks, n], with n blocks of ``values``"""
    return rows.reshape(-1, values // sub_block, sub_block).permute(2, 1, 0).contiguous()


def _blocks_first(levels: Tensor) -> Tensor:
    """[values of a sub-block, sub-blocks, n] -> [n, values of a block]"""
    return levels.permute(2, 1, 0).flatten(1)


# ---- rounding as ggml does it ----


def _onto_extreme(x: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """``d`` that maps the extreme value to the level ``-lowest``, and the levels [n, values]."""
    d = extreme(x) / -lowest
    q = (x * quotient(1.0, d)).add_(lowest + 0.5).floor_().clamp_(0, 2 * lowest - 1)
    return d, q.sub_(lowest).T


def _onto_range(x: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """``d`` and ``m`` that map the ends of the range to the levels 0 and ``top``, and the
    levels."""
    low = x.amin(0)
    d = (x.amax(0) - low) / top
    q = (x - low).mul_(quotient(1.0, d)).add_(0.5).floor_().clamp_(0, top)
    return d, low, q.T


def _onto_magnitude(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """``d`` that maps the extreme value to the level ``top`` or ``-top``, and the levels."""
    d = x.abs().amax(0) / top
    magnitude = (x * quotient(1.0, d)).abs()
    whole = magnitude.floor()
    rounded = whole + (2 * (magnitude - whole)).floor()  # halves away from zero
    return d, torch.copysign(rounded, x).T


_LIKE_GGML: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q4_0: lambda x: pack.pack_q4_0(*_onto_extreme(x, 8)),
    GGMLType.Q4_1: lambda x: pack.pack_q4_1(*_onto_range(x, 15)),
    GGMLType.Q5_0: lambda x: pack.pack_q5_0(*_onto_extreme(x, 16)),
    GGMLType.Q5_1: lambda x: pack.pack_q5_1(*_onto_range(x, 31)),
    GGMLType.Q8_0: lambda x: pack.pack_q8_0(*_onto_magnitude(x, 127)),
}
"""For each type: a function that packs blocks of values [values, n] to bytes, as ggml rounds."""

QUANTIZABLE = (*FLOAT_DTYPES, *SEARCHED)
"""The types that ``quantize_to_blocks`` can make."""
