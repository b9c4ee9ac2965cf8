"""Products of few rows with a weight of any kind, in one launch that is bound by reading the
weight.

    weight [N, K] times x [T, K] --(+ bias)--> out [T, N], or added to it
                                       `------> activation(first half) * second half

A program has a tile of outputs and of rows, and some of the inputs (``splits.py``). The weight is
the first factor of its products, since tensor cores take 64 rows of that one and as few as 8
columns of the other: with an activation, half of the tile are gates, and half are the ups that
belong to them. Codes become numbers of the type of x in its registers. Codes of 4 bits are read 128
inputs at a time: 16 words of each output, in which every nibble is a slice of 16 inputs (see
``weights.py``), and one small product::

    words [16, block_n] --> & 15      times scale, + min  --> [16, block_n]  times x[:, 0 .. 15]
                        --> >> 4 & 15 ...                                    times x[:, 16 .. 31]

Rows are normed before, by a launch of its own: a norm in this one took more time than the product
(docs/gpu.md has the figures).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import activate
from octavo.kernels.cuda.kv_codes import code_values
from octavo.kernels.cuda.products import GemmFusion
from octavo.kernels.cuda.splits import (
    Tiling,
    Workspace,
    add_product,
    arrives_last,
    cut,
    sum_parts,
)
from octavo.kernels.cuda.weights import PLANES, TILE_K, DenseWeight, W4Weight, W8Weight

Matrix: TypeAlias = DenseWeight | W4Weight | W8Weight

BLOCK_N = 64  # rows of a weight in a program: gates and ups, or outputs
# Of floats: four tiles of 64 inputs in flight, and two programs for each multiprocessor, were
# within 3 % of the fastest of ten choices for each matrix of 0.6B and 8B on an H200.
_DENSE_BLOCK_K, _DENSE_PROGRAMS = 64, 2
_CODED_PROGRAMS = 3


def tiling_of(
    weight: Matrix,
    rows: int,
    num_processors: int,
    *,
    gated: bool = False,
    row_tiles: int = 1,
    of_outputs: int | None = None,
) -> Tiling:
    """Choose how ``linear`` cuts a weight on a GPU with ``num_processors`` multiprocessors.

    Args:
        rows: rows of x per program: 16, 32 or 64. The sums of a row are the same for all of them,
            except for the instructions that a GPU has for so many rows.
        gated: whether there is an activation.
        row_tiles: maximal tiles of rows in one launch.
        of_outputs: outputs of the matrix that the weight is a part of, whose number of splits it
            shall have; None: it is none.
    """
    n, k = weight.shape
    halves = 2 if gated else 1
    num_outputs = n // halves
    is_dense = isinstance(weight, DenseWeight)
    return cut(
        num_outputs,
        k,
        num_processors,
        block_n=BLOCK_N // 2 if gated else BLOCK_N,
        block_k=_DENSE_BLOCK_K if is_dense else TILE_K,
        programs_each=_DENSE_PROGRAMS if is_dense else _CODED_PROGRAMS,
        part_size=rows * BLOCK_N,
        rows=rows,
        row_tiles=row_tiles,
        of_outputs=None if of_outputs is None else of_outputs // halves,
    )


def linear(
    x: Tensor, weight: Matrix, out: Tensor, tiling: Tiling, workspace: Workspace, fusion: GemmFusion
) -> None:
    """Compute out = x @ weight.T, summed in float32, with the fused work before and behind it.

    Args:
        x: [T, K] of at most ``tiling.max_rows`` rows, whose stride may be larger than K; of the
            type of the weight, if that is of floats.
        out: [T, N], or [T, N / 2] with an activation, of any float type.
        tiling: from ``tiling_of``, for this weight.
        fusion: without a norm.
    """
    (num_rows, k), (num_rows_out, n) = x.shape, out.shape
    assert num_rows <= tiling.max_rows and num_rows_out == num_rows, (x.shape, out.shape)
    assert weight.shape == (n if fusion.activation is None else 2 * n, k), (weight.shape, out.shape)
    assert x.stride(1) == out.stride(1) == 1
    assert fusion.norm is None
    workspace.check(tiling)
    if num_rows == 0:
        return
    kind, group, values, scales, mins = parts_of(weight, x.dtype)
    _linear[tiling.grid(num_rows)](
        x,
        x.stride(0),
        values,
        values.stride(0),
        scales,
        mins,
        0 if scales is None else scales.stride(0),
        fusion.bias,
        out,
        out.stride(0),
        workspace.parts,
        workspace.counters,
        num_rows,
        n,
        k,
        tiling.split_k,
        KIND=kind,
        GROUP=group,
        ACTIVATION=fusion.activation,
        ACCUMULATE=fusion.accumulate,
        ROWS=tiling.rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=tiling.block_k,
        PLANES=PLANES,
        SPLITS=tiling.splits,
        PART=tiling.part_size,
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def parts_of(
    weight: Matrix, dtype: torch.dtype
) -> tuple[str, int | None, Tensor, Tensor | None, Tensor | None]:
    """Name of a weight's kind in kernels, its group, its values or codes, its scales, and its
    mins."""
    if isinstance(weight, DenseWeight):
        assert weight.values.is_contiguous() and weight.values.dtype == dtype
        return "float", None, weight.values, None, None
    if isinstance(weight, W4Weight):
        return "nibbles", weight.group, weight.words, weight.scales, weight.mins
    kind = "fp8" if weight.is_fp8 else "s8"
    return kind, weight.group, weight.codes.view(torch.uint8), weight.scales, weight.mins


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,
    x_stride,
    weight,
    weight_stride,
    scales,
    mins,
    groups_stride,
    bias,
    out,
    out_stride,
    parts,
    counters,
    num_rows,
    n,
    k,
    split_k,
    KIND: tl.constexpr,  # "float", "nibbles", "s8", "fp8"
    GROUP: tl.constexpr,  # None for "float", and for one scale a row
    ACTIVATION: tl.constexpr,  # None: no gates
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    rows = row_tile * ROWS + row
    row_exists = rows < num_rows
    columns, column_exists = columns_of_tile(tile, n, ACTIVATION is not None, BLOCK_N)
    sums = sums_of_tile(
        x + rows.to(tl.int64) * x_stride, row_exists, weight, weight_stride, scales, mins,
        groups_stride, columns, column_exists,
        split * split_k, tl.minimum(k, (split + 1) * split_k), k,
        KIND, GROUP, ROWS, BLOCK_N, BLOCK_K, PLANES, STAGES,
    )  # fmt: skip

    if SPLITS > 1:
        own_tile = tile * tl.num_programs(0) + row_tile
        stride = tl.num_programs(0) * tl.num_programs(1) * PART
        own = parts + own_tile.to(tl.int64) * PART + row[None, :] * BLOCK_N
        own += tl.arange(0, BLOCK_N)[:, None]
        tl.store(own + split * stride, sums)
        if not arrives_last(counters + own_tile, SPLITS):
            return
        sums = sum_parts(own, stride, SPLITS)

    store_tile(
        sums, tile, n, rows, row_exists, scales, bias, out, out_stride,
        KIND, GROUP, ACTIVATION, ACCUMULATE, ROWS, BLOCK_N,
    )  # fmt: skip


@triton.jit
def store_tile(
    sums,
    tile,
    n,
    rows,
    row_exists,
    scales,
    bias,
    out,
    out_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the sums [BLOCK_N, ROWS] of a tile, with the fused work behind a product."""
    columns, column_exists = columns_of_tile(tile, n, ACTIVATION is not None, BLOCK_N)
    sums = finished(sums, scales, bias, columns, column_exists, KIND, GROUP)
    if ACTIVATION is not None:
        gates, ups = gates_and_ups(sums, BLOCK_N, ROWS)
        sums = activate(gates, ACTIVATION) * ups
        columns, column_exists = columns_of_tile(tile, n, False, BLOCK_N // 2)
    places = out + rows.to(tl.int64)[None, :] * out_stride + columns[:, None]
    mask = row_exists[None, :] & column_exists[:, None]
    if ACCUMULATE:
        sums += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def columns_of_tile(tile, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of a weight [N, K], or [2 N, K] with gates before ups, that a tile has, and whether they
    exist: of gates half of the tile, and then the ups that belong to them."""
    place = tl.arange(0, BLOCK_N)
    if GATED:
        output = tile * (BLOCK_N // 2) + place % (BLOCK_N // 2)
        return output + place // (BLOCK_N // 2) * n, output < n
    output = tile * BLOCK_N + place
    return output, output < n


@triton.jit
def gates_and_ups(sums, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """The two halves [BLOCK_N / 2, ROWS] of the sums of a tile that has both."""
    halves = tl.reshape(sums, [2, BLOCK_N // 2, ROWS])
    return tl.split(tl.permute(halves, (1, 2, 0)))


@triton.jit
def sums_of_tile(
    of_rows,
    row_exists,
    weight,
    weight_stride,
    scales,
    mins,
    groups_stride,
    columns,
    column_exists,
    begin,
    end,
    k,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums [BLOCK_N, ROWS] over the inputs from ``begin`` to ``end``, of rows at ``of_rows``
    [ROWS] and rows ``columns`` of the weight."""
    PLANE_K: tl.constexpr = BLOCK_K // PLANES
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if KIND == "nibbles":
            words = load_words(
                weight, start, weight_stride, columns, column_exists, PLANES, BLOCK_K
            )
            for plane in tl.static_range(PLANES):
                first = start + plane * PLANE_K
                values = _load_inputs(of_rows, first + tl.arange(0, PLANE_K), row_exists, k)
                if plane * PLANE_K % GROUP == 0:
                    scale, low = load_group(
                        scales, mins, first // GROUP, groups_stride, columns, column_exists
                    )
                numbers = of_nibbles(words, plane, scale, low).to(values.dtype)
                sums = add_product(sums, tl.trans(numbers), values)
        else:
            values = _load_inputs(of_rows, start + tl.arange(0, BLOCK_K), row_exists, k)
            numbers = load_numbers(
                weight, weight_stride, scales, mins, groups_stride, columns, column_exists,
                start, k, values.dtype, KIND, GROUP, BLOCK_K,
            )  # fmt: skip
            sums = add_product(sums, numbers, values)
    return sums


@triton.jit
def _load_inputs(of_rows, inputs, row_exists, k):
    """Some inputs of all rows: [inputs, ROWS]."""
    mask = row_exists[None, :] & (inputs < k)[:, None]
    return tl.load(of_rows[None, :] + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def load_numbers(
    weight,
    stride,
    scales,
    mins,
    groups_stride,
    columns,
    exists,
    start,
    k,
    dtype: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Numbers of some outputs, stored in rows, for the inputs from ``start`` on:
    [columns, BLOCK_K].

    Codes with one scale per row are returned without it.
    """
    inputs = start + tl.arange(0, BLOCK_K)
    places = weight + columns.to(tl.int64)[:, None] * stride + inputs[None, :]
    codes = tl.load(places, mask=exists[:, None] & (inputs < k)[None, :], other=0)
    if KIND == "s8":
        codes ^= 128  # unsigned, as ``code_values`` takes them
    if GROUP is None:
        numbers = code_values(codes, dtype, KIND)
    else:
        numbers = code_values(codes, tl.float32, KIND)
        numbers = tl.reshape(numbers, [codes.shape[0], BLOCK_K // GROUP, GROUP])
        groups = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        place = groups.to(tl.int64)[None, :] * groups_stride + columns[:, None]
        mask = exists[:, None] & (groups * GROUP < k)[None, :]
        numbers *= tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)[:, :, None]
        if mins is not None:
            numbers += tl.load(mins + place, mask=mask, other=0.0).to(tl.float32)[:, :, None]
        numbers = tl.reshape(numbers, [codes.shape[0], BLOCK_K])
    return numbers.to(dtype)


@triton.jit
def load_words(words, start, stride, columns, exists, PLANES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words of the 128 inputs from ``start`` on: int32 [16, columns]."""
    rows = (start // PLANES + tl.arange(0, BLOCK_K // PLANES)).to(tl.int64)[:, None]
    return tl.load(words + rows * stride + columns[None, :], mask=exists[None, :], other=0)


@triton.jit
def load_group(scales, mins, group, stride, columns, exists):
    """Scales and mins of a group: float32 [1, columns] each."""
    place = group.to(tl.int64) * stride + columns
    scale = tl.load(scales + place, mask=exists, other=0.0).to(tl.float32)
    low = -8.0 * scale
    if mins is not None:
        low = tl.load(mins + place, mask=exists, other=0.0).to(tl.float32)
    return scale[None, :], low[None, :]


@triton.jit
def of_nibbles(words, plane: tl.constexpr, scale, low):
    """Numbers of one nibble of each word: float32, rounded at most once."""
    codes = (words >> 4 * plane) & 15
    # The bits of 2^23 + code: faster than a conversion.
    return ((codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * scale + low


@triton.jit
def finished(sums, scales, bias, columns, exists, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Sums [columns, rows] times the scales of rows of codes, plus the bias."""
    if KIND != "float" and GROUP is None:
        sums *= tl.load(scales + columns, mask=exists, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)[:, None]
    return sums
