"""Dequantizes codes: a whole matrix, for products of many rows, or some rows, for embeddings."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.linear import (
    load_group,
    load_numbers,
    load_words,
    of_nibbles,
    parts_of,
)
from octavo.kernels.cuda.weights import PLANES, TILE_K, W4Weight, W8Weight

_NIBBLES_N = 64  # outputs of a program; it has 128 inputs
_BYTES_N, _BYTES_K = 16, 256


def dequantize(weight: W4Weight | W8Weight, out: Tensor, ids: Tensor | None = None) -> None:
    """Write the numbers of a weight to ``out`` [N, K], of any float type; or its rows ``ids``
    (int32 [T]) to ``out`` [T, K]."""
    (num_rows, k), rows = out.shape, weight.shape[0] if ids is None else len(ids)
    assert (num_rows, k) == (rows, weight.shape[1]), (out.shape, weight.shape)
    if num_rows == 0:
        return
    kind, group, codes, scales, mins = parts_of(weight, out.dtype)
    groups_stride = weight.scales.stride(0)
    tensors = codes, codes.stride(0), scales, mins, groups_stride, ids, out, *out.stride()
    if isinstance(weight, W4Weight):
        grid = triton.cdiv(k, TILE_K), triton.cdiv(num_rows, _NIBBLES_N)
        _nibbles[grid](*tensors, num_rows, k, group, _NIBBLES_N, TILE_K, PLANES, num_warps=4)
    else:
        grid = triton.cdiv(k, _BYTES_K), triton.cdiv(num_rows, _BYTES_N)
        _bytes[grid](*tensors, num_rows, k, kind, group, _BYTES_N, _BYTES_K, num_warps=4)


def room_for(weight: W4Weight | W8Weight, memory: Tensor) -> Tensor:
    """View memory as a matrix [N, K] in the order in which the codes of a weight lie."""
    n, k = weight.shape
    in_order = memory[: n * k]
    return in_order.view(k, n).t() if isinstance(weight, W4Weight) else in_order.view(n, k)


@triton.jit
def _nibbles(
    words,
    words_stride,
    scales,
    mins,
    groups_stride,
    ids,
    out,
    out_stride,
    out_stride_k,
    num_rows,
    k,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
):
    PLANE_K: tl.constexpr = BLOCK_K // PLANES
    start = tl.program_id(0) * BLOCK_K
    rows, exists, columns = _rows_of(ids, num_rows, BLOCK_N)
    packed = load_words(words, start, words_stride, columns, exists, PLANES, BLOCK_K)
    for plane in tl.static_range(PLANES):
        first = start + plane * PLANE_K
        if plane * PLANE_K % GROUP == 0:
            scale, low = load_group(scales, mins, first // GROUP, groups_stride, columns, exists)
        numbers = of_nibbles(packed, plane, scale, low)
        inputs = (first + tl.arange(0, PLANE_K))[:, None]
        places = out + inputs.to(tl.int64) * out_stride_k + rows.to(tl.int64)[None, :] * out_stride
        tl.store(places, numbers.to(out.dtype.element_ty), mask=(inputs < k) & exists[None, :])


@triton.jit
def _bytes(
    codes,
    codes_stride,
    scales,
    mins,
    groups_stride,
    ids,
    out,
    out_stride,
    out_stride_k,
    num_rows,
    k,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_K
    rows, exists, columns = _rows_of(ids, num_rows, BLOCK_N)
    numbers = load_numbers(
        codes, codes_stride, scales, mins, groups_stride, columns, exists, start, k, tl.float32,
        KIND, GROUP, BLOCK_K,
    )  # fmt: skip
    if GROUP is None:
        numbers *= tl.load(scales + columns, mask=exists, other=0.0).to(tl.float32)[:, None]
    inputs = (start + tl.arange(0, BLOCK_K))[None, :]
    places = out + rows.to(tl.int64)[:, None] * out_stride + inputs * out_stride_k
    tl.store(places, numbers.to(out.dtype.element_ty), mask=exists[:, None] & (inputs < k))


@triton.jit
def _rows_of(ids, num_rows, BLOCK_N: tl.constexpr):
    """Rows of ``out`` that a program has, a mask of those that exist, and their rows in the
    weight."""
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = rows < num_rows
    columns = rows
    if ids is not None:
        columns = tl.load(ids + rows, mask=exists, other=0)
    return rows, exists, columns
