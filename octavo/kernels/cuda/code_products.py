"""Products in 8 bits: activations become codes with a scale for each row, and products are
rescaled.

x [T, K] --> codes [T, K], scales [T] --(products of codes, [T, N])--> times both scales --> out
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import CODE_TYPES, scale_of, to_codes

_BLOCK_OF_ROW = 4096
_BLOCK = 1024


def row_codes(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """Convert rows to codes; the largest magnitude of a row has the largest code.

    Args:
        x: [T, K], in any float type; the row stride may be larger than K.
        out: [T, K], int8 or float8_e4m3fn.
        scales: float32 [T]: ``out`` times these is x. A row of zeros has scale 0.
    """
    num_rows, width = x.shape
    assert out.shape == x.shape and x.stride(1) == out.stride(1) == 1
    if num_rows:
        strides, code = (x.stride(0), out.stride(0)), CODE_TYPES[out.dtype]
        codes = out.view(torch.uint8)
        _row_codes[(num_rows,)](
            x, codes, scales, width, *strides, *code, _BLOCK_OF_ROW, num_warps=16
        )


def scale_products(
    products: Tensor,
    row_scales: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Compute out = products * row_scales * scales + bias, in float32, rounded once; or add that to
    out.

    Args:
        products: of codes, int32 or float32 [T, N], contiguous; ``out`` may share their memory.
        row_scales: float32 [T].
        scales: float32 [N], of outputs.
        out: [T, N] of any float type; the row stride may be larger than N.
        bias: [N].
    """
    num_rows, n = products.shape
    assert out.shape == products.shape and products.is_contiguous() and out.stride(1) == 1
    if num_rows:
        grid = num_rows, triton.cdiv(n, _BLOCK)
        _scale_products[grid](
            products, row_scales, scales, bias, out, out.stride(0), n, accumulate, _BLOCK,
            num_warps=4,
        )  # fmt: skip


@triton.jit
def _row_codes(
    x,
    out,
    scales,
    width,
    x_stride,
    out_stride,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program handles a row, and reads it twice: the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.zeros([BLOCK], tl.float32)
    damage = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        values = _load(x + row * x_stride, start + tl.arange(0, BLOCK), width)
        greatest = tl.maximum(greatest, tl.abs(values))
        damage += values * 0.0
    scale = scale_of(greatest, damage, LARGEST)
    tl.store(scales + row, scale)
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        codes = to_codes(_load(x + row * x_stride, columns, width), scale, CODE)
        tl.store(out + row * out_stride + columns, codes, mask=columns < width)


@triton.jit
def _load(row, columns, width):
    return tl.load(row + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _scale_products(
    products,
    row_scales,
    scales,
    bias,
    out,
    out_stride,
    n,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < n
    values = tl.load(products + row * n + columns, mask=exists, other=0).to(tl.float32)
    values *= tl.load(row_scales + row) * tl.load(scales + columns, mask=exists, other=0.0)
    if bias is not None:
        values += tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)
    place = out + row * out_stride + columns
    if ACCUMULATE:
        values += tl.load(place, mask=exists, other=0.0).to(tl.float32)
    tl.store(place, values.to(out.dtype.element_ty), mask=exists)
