"""Norms of rows, with the residual sum before them, and codes for 8-bit products behind them.

One program has a row, all of it in registers::

    x [T, K] --(its own norm)--> + residual [T, K] --> norm --> out [T, K], or codes and scales [T]
                                        `--> total [T, K], in place of the residual or elsewhere

A layernorm has neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import CODE_TYPES, to_codes
from octavo.kernels.op_arguments import RowNorm

MAX_WIDTH = 16384  # values that the registers of a program hold


def rmsnorm(
    x: Tensor,
    norm: RowNorm,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm_before_add: RowNorm | None = None,
    rows: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Compute out = x / sqrt(mean(x^2) + eps) * weight over rows, in float32, rounded once at the
    end.

    Args:
        x: [T, K], in any float type; the row stride may be larger than K.
        out: [T, K]; of int8 or float8_e4m3fn if there are ``scales``, else of any float type.
        residual: [T, K]. It becomes residual + x, rounded to its own type, and that is normed.
        total: [T, K], of the type of the residual: takes the sum in its place.
        norm_before_add: norm of x, rounded to its own type, before it is added.
        rows: integers [T]: rows of x [any number, K] to norm. There is no residual then.
        scales: float32 [T]. ``out`` times these is the norm; the largest magnitude of a row has the
            largest code. A row of zeros has scale 0.
    """
    num_rows, width = out.shape
    assert width <= MAX_WIDTH and x.shape[1] == width, (x.shape, out.shape)
    assert len(x if rows is None else rows) == num_rows, (x.shape, out.shape)
    assert (scales is not None) == (out.dtype in CODE_TYPES), out.dtype
    assert residual is not None or (norm_before_add is None and total is None)
    assert residual is None or rows is None
    total = residual if total is None else total
    assert all(t is None or t.stride(1) == 1 for t in (x, out, residual, total))
    if num_rows == 0:
        return
    before, code = norm_before_add or norm, CODE_TYPES.get(out.dtype)
    _rmsnorm[(num_rows,)](
        x,
        x.stride(0),
        rows,
        residual,
        0 if residual is None else residual.stride(0),
        total,
        0 if total is None else total.stride(0),
        before.weight,
        before.eps,
        norm.weight,
        norm.eps,
        out if code is None else out.view(torch.uint8),
        out.stride(0),
        scales,
        width,
        NORM_BEFORE_ADD=norm_before_add is not None,
        CODE=None if code is None else code.name,
        LARGEST=None if code is None else code.largest,
        **_block_of(width),
    )


def layernorm(x: Tensor, norm: RowNorm, bias: Tensor | None, out: Tensor) -> None:
    """Compute out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over rows [T, K],
    in float32, rounded once at the end; the row stride may be larger than K."""
    num_rows, width = out.shape
    assert width <= MAX_WIDTH and x.shape == out.shape and x.stride(1) == out.stride(1) == 1
    if num_rows:
        _layernorm[(num_rows,)](
            x, x.stride(0), norm.weight, bias, norm.eps, out, out.stride(0), width,
            **_block_of(width),
        )  # fmt: skip


def _block_of(width: int) -> dict[str, int]:
    """Block of a row and its warps: 8 to 32 values a thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}


@triton.jit
def _rmsnorm(
    x,
    x_stride,
    rows,
    residual,
    residual_stride,
    total,
    total_stride,
    weight_before,
    eps_before,
    weight,
    eps,
    out,
    out_stride,
    scales,
    width,
    NORM_BEFORE_ADD: tl.constexpr,
    CODE: tl.constexpr,  # None: floats
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < width
    source = row if rows is None else tl.load(rows + row).to(tl.int64)
    values = tl.load(x + source * x_stride + columns, mask=exists, other=0.0).to(tl.float32)
    if residual is not None:
        if NORM_BEFORE_ADD:
            values = _normed(values, weight_before, eps_before, width, columns, exists)
            values = values.to(x.dtype.element_ty).to(tl.float32)
        place = residual + row * residual_stride + columns
        values += tl.load(place, mask=exists, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(total + row * total_stride + columns, rounded, mask=exists)
        values = rounded.to(tl.float32)
    values = _normed(values, weight, eps, width, columns, exists)
    place = out + row * out_stride + columns
    if CODE is None:
        tl.store(place, values.to(out.dtype.element_ty), mask=exists)
    else:
        scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST)
        tl.store(scales + row, scale)
        tl.store(place, to_codes(values, scale, CODE), mask=exists)


@triton.jit
def _layernorm(x, x_stride, weight, bias, eps, out, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < width
    values = tl.load(x + row * x_stride + columns, mask=exists, other=0.0).to(tl.float32)
    centred = tl.where(exists, values - tl.sum(values, 0) / width, 0.0)
    values = _normed(centred, weight, eps, width, columns, exists)
    if bias is not None:
        values += tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)
    place = out + row * out_stride + columns
    tl.store(place, values.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _normed(values, weight, eps, width, columns, exists):
    mean_square = tl.sum(values * values, 0) / width
    factor = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    return values * tl.rsqrt(mean_square + eps) * factor
