"""Products of up to 16 rows with a weight in 16 bits: as fast as the weight can be read.

    x [T, K] --(norm)--> times weight [N, K] --(+ bias)--> out [T, N], or added to it
                                               `-----------> activation(first half) * second half

The norm costs no pass of its own: its weight is applied to inputs as they are read, and its factor,
one number for a row, to the sums. The squares for it are added up on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import activate
from octavo.kernels.cuda.products import Norm
from octavo.kernels.cuda.splits import (
    Tiling,
    Workspace,
    add_product,
    arrives_last,
    cut,
    sum_parts,
)

MAX_ROWS = 16  # what an instruction that multiplies matrices takes anyway


def gemv_tiling(n: int, k: int, num_processors: int, *, gated: bool = False) -> Tiling:
    """How ``gemv`` cuts a weight [n, k] on a GPU with so many multiprocessors."""
    num_outputs = n // 2 if gated else n
    block_n = 32 if num_outputs >= 64 * num_processors else 16
    # Of each program: the squares, the sums, and those of the ups.
    part_size = MAX_ROWS * (1 + block_n * (2 if gated else 1))
    return cut(num_outputs, k, num_processors, block_n=block_n, part_size=part_size)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: Tiling,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    accumulate: bool = False,
) -> None:
    """out = x @ weight.T, summed in float32.

    Args:
        x: [T, K] of at most 16 rows, which may be farther apart than K.
        weight: [N, K] of the type of x; contiguous.
        out: [T, N], or [T, N / 2] with an activation, of any float type.
        tiling: of ``gemv_tiling``, for this weight.
        bias: [N].
        norm: of x. Not in float16, whose range x times the norm's weight may leave.
        activation: "silu", "gelu_tanh" or "gelu_erf": of the first N / 2 outputs, times the others.
        accumulate: the product is added to ``out``, the residual stream.
    """
    (num_rows, k), (num_rows_out, n) = x.shape, out.shape
    assert num_rows <= MAX_ROWS and num_rows_out == num_rows, (x.shape, out.shape)
    assert weight.shape == (n if activation is None else 2 * n, k), (weight.shape, out.shape)
    assert weight.is_contiguous() and weight.dtype == x.dtype
    assert x.stride(1) == out.stride(1) == 1
    assert norm is None or x.dtype != torch.float16
    workspace.check(tiling)
    if num_rows == 0:
        return
    _gemv[tiling.grid](
        x,
        x.stride(0),
        weight,
        bias,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        out,
        out.stride(0),
        workspace.parts,
        workspace.counters,
        num_rows,
        n,
        k,
        ACTIVATION=activation,
        ACCUMULATE=accumulate,
        ROWS=MAX_ROWS,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits,
        SPLIT_K=tiling.split_k,
        PART=tiling.part_size,
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gemv(
    x,
    x_stride,
    weight,
    bias,
    norm_weight,
    eps,
    out,
    out_stride,
    parts,
    counters,
    num_rows,
    n,
    k,
    ACTIVATION: tl.constexpr,  # None: no gates
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists, column_exists = rows < num_rows, columns < n
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride
    of_columns = weight + columns.to(tl.int64)[None, :] * k
    half = n.to(tl.int64) * k

    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    end = tl.minimum(k, (split + 1) * SPLIT_K)
    for start in tl.range(split * SPLIT_K, end, BLOCK_K, num_stages=STAGES):
        inputs = start + tl.arange(0, BLOCK_K)
        exists = inputs < k
        mask = row_exists[:, None] & exists[None, :]
        values = tl.load(of_rows + inputs[None, :], mask=mask, other=0.0)
        if norm_weight is not None:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            factors = tl.load(norm_weight + inputs, mask=exists, other=0.0).to(tl.float32)
            values = (wide * factors[None, :]).to(values.dtype)
        places, mask = of_columns + inputs[:, None], exists[:, None] & column_exists[None, :]
        sums = add_product(sums, values, tl.load(places, mask=mask, other=0.0))
        if ACTIVATION is not None:
            ups = add_product(ups, values, tl.load(places + half, mask=mask, other=0.0))

    if SPLITS > 1:
        stride = tl.num_programs(0) * PART
        own = parts + tile * PART + rows
        own_sums = parts + tile * PART + ROWS + rows[:, None] * BLOCK_N
        own_sums += tl.arange(0, BLOCK_N)[None, :]
        own_ups = own_sums + ROWS * BLOCK_N
        tl.store(own + split * stride, squares)
        tl.store(own_sums + split * stride, sums)
        if ACTIVATION is not None:
            tl.store(own_ups + split * stride, ups)
        if not arrives_last(counters + tile, SPLITS):
            return
        squares = sum_parts(own, stride, SPLITS)
        sums = sum_parts(own_sums, stride, SPLITS)
        if ACTIVATION is not None:
            ups = sum_parts(own_ups, stride, SPLITS)

    if norm_weight is not None:
        factor = tl.rsqrt(squares / k + eps)[:, None]
        sums, ups = sums * factor, ups * factor
    sums = _with_bias(sums, bias, columns, column_exists)
    if ACTIVATION is not None:
        ups = _with_bias(ups, bias, n + columns, column_exists)
        sums = activate(sums, ACTIVATION) * ups
    places = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = row_exists[:, None] & column_exists[None, :]
    if ACCUMULATE:
        sums += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _with_bias(sums, bias, columns, exists):
    if bias is not None:
        sums += tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    return sums
