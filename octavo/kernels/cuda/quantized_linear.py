"""Products with weights of 4 bits: of few rows as fast as the codes can be read, of many through a
copy of the weight in the type of the activations.

A program has a tile of outputs, and takes 128 inputs at a time: 16 words of each output, in which
every nibble is a slice of 16 inputs (see ``packing.py``), and one small product::

    words [16, block_n] --> & 15      times scale, + min  --> [16, block_n]  times x[:, 0 .. 15]
                        --> >> 4 & 15 ...                                    times x[:, 16 .. 31]
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.packing import PLANES, TILE_K, W4Weight
from octavo.kernels.cuda.splits import (
    BLOCK_K,
    Tiling,
    Workspace,
    add_product,
    arrives_last,
    cut,
    sum_parts,
)

MAX_ROWS = 64  # more are worth a copy of the weight

_BLOCK_N = 64
assert BLOCK_K == TILE_K


def w4_tiling(n: int, k: int, num_processors: int) -> Tiling:
    """How ``linear_w4`` cuts a weight [n, k] on a GPU with so many multiprocessors."""
    return cut(n, k, num_processors, block_n=_BLOCK_N, part_size=MAX_ROWS * _BLOCK_N)


def linear_w4(
    x: Tensor,
    weight: W4Weight,
    out: Tensor,
    tiling: Tiling,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
) -> None:
    """out = x @ weight.T + bias for at most 64 rows; in the type of x, and summed in float32.

    Args:
        x: [T, K] in any float type; rows may be farther apart than K.
        weight: on the device of x.
        out: [T, N] in any float type.
        tiling: of ``w4_tiling``, for this weight.
        bias: [N].
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    assert num_rows <= MAX_ROWS and weight.shape[1] == k, (x.shape, weight.shape)
    assert out.shape == (num_rows, n), (out.shape, weight.shape)
    assert x.stride(1) == out.stride(1) == 1
    workspace.check(tiling)
    if num_rows == 0:
        return
    _linear_w4[tiling.grid](
        x,
        x.stride(0),
        weight.words,
        weight.scales,
        weight.mins,
        bias,
        out,
        out.stride(0),
        workspace.parts,
        workspace.counters,
        num_rows,
        n,
        k,
        GROUP=weight.group,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=tiling.block_n,
        TILE_K=TILE_K,
        PLANES=PLANES,
        SPLITS=tiling.splits,
        SPLIT_K=tiling.split_k,
        PART=tiling.part_size,
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def dequantize_w4(weight: W4Weight, out: Tensor) -> None:
    """The numbers of a weight [N, K] in ``out`` [K, N], of any float type: for x @ out."""
    n, k = weight.shape
    assert out.shape == (k, n) and out.is_contiguous(), (out.shape, weight.shape)
    _dequantize_w4[(triton.cdiv(k, TILE_K), triton.cdiv(n, _BLOCK_N))](
        weight.words,
        weight.scales,
        weight.mins,
        out,
        n,
        k,
        GROUP=weight.group,
        BLOCK_N=_BLOCK_N,
        TILE_K=TILE_K,
        PLANES=PLANES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _linear_w4(
    x,
    x_stride,
    words,
    scales,
    mins,
    bias,
    out,
    out_stride,
    parts,
    counters,
    num_rows,
    n,
    k,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PLANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    PLANE_K: tl.constexpr = TILE_K // PLANES
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists, column_exists = (rows < num_rows)[:, None], columns < n
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride

    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    end = tl.minimum(k, (split + 1) * SPLIT_K)
    for start in tl.range(split * SPLIT_K, end, TILE_K, num_stages=STAGES):
        packed = _load_words(words, start, n, columns, column_exists, PLANES, PLANE_K)
        for plane in tl.static_range(PLANES):
            first = start + plane * PLANE_K
            if plane * PLANE_K % GROUP == 0:
                scale, low = _load_group(scales, mins, first // GROUP, n, columns, column_exists)
            numbers = _dequantize(packed, plane, scale, low)
            inputs = first + tl.arange(0, PLANE_K)[None, :]
            values = tl.load(of_rows + inputs, mask=row_exists & (inputs < k), other=0.0)
            sums = add_product(sums, values, numbers.to(values.dtype))

    if SPLITS > 1:
        stride = tl.num_programs(0) * PART
        own = parts + tile * PART + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + split * stride, sums)
        if not arrives_last(counters + tile, SPLITS):
            return
        sums = sum_parts(own, stride, SPLITS)

    if bias is not None:
        sums += tl.load(bias + columns, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    places = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=row_exists & column_exists[None, :])


@triton.jit
def _dequantize_w4(
    words,
    scales,
    mins,
    out,
    n,
    k,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PLANES: tl.constexpr,
):
    PLANE_K: tl.constexpr = TILE_K // PLANES
    start = tl.program_id(0) * TILE_K
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = columns < n
    packed = _load_words(words, start, n, columns, exists, PLANES, PLANE_K)
    for plane in tl.static_range(PLANES):
        first = start + plane * PLANE_K
        if plane * PLANE_K % GROUP == 0:
            scale, low = _load_group(scales, mins, first // GROUP, n, columns, exists)
        numbers = _dequantize(packed, plane, scale, low)
        inputs = (first + tl.arange(0, PLANE_K))[:, None]
        places = out + inputs.to(tl.int64) * n + columns[None, :]
        tl.store(places, numbers.to(out.dtype.element_ty), mask=(inputs < k) & exists[None, :])


@triton.jit
def _load_words(words, start, n, columns, exists, PLANES: tl.constexpr, PLANE_K: tl.constexpr):
    """The words of the 128 inputs from ``start`` on: int32 [16, columns]."""
    rows = (start // PLANES + tl.arange(0, PLANE_K)).to(tl.int64)[:, None]
    return tl.load(words + rows * n + columns[None, :], mask=exists[None, :], other=0)


@triton.jit
def _load_group(scales, mins, group, n, columns, exists):
    """The scales and mins of a group: float32 [1, columns] each."""
    place = group.to(tl.int64) * n + columns
    scale = tl.load(scales + place, mask=exists, other=0.0).to(tl.float32)
    low = -8.0 * scale
    if mins is not None:
        low = tl.load(mins + place, mask=exists, other=0.0).to(tl.float32)
    return scale[None, :], low[None, :]


@triton.jit
def _dequantize(packed, plane: tl.constexpr, scale, low):
    """The numbers of a nibble of each word: float32, rounded once, if at all."""
    codes = (packed >> 4 * plane) & 15
    # The bits of 2^23 + code: faster than a conversion.
    return ((codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * scale + low
