"""Products of one row with a weight, by multiply-adds in float32, since all that takes time is
reading the weight.

    x [1, K] --(norm)--> times weight [N, K] --(+ bias)--> out [1, N], or added to it
                                               `-----------> activation(first half) * second half

Floats, and codes of a byte with one scale for each row, lie in rows (``_of_rows``). A program has
some rows of the weight and all of their inputs, so nothing is split. A norm takes no pass of its
own: its weight is applied to inputs as they are read, and its factor to the sums, from squares that
are summed along the way.

Codes of 4 bits lie side by side (``_of_nibbles``, and ``weights.py``); inputs are split, and rows
are normed before. A code takes three operations: it is shifted to the highest bits of a fraction,
given the exponent of 1, and multiplied. What was added to it is taken off for a whole group::

    f = 1 + code / 16        sum of x (scale code + min) = 16 scale (sum of x f)
                                                           + (min - 16 scale) (sum of x)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.linear import (
    columns_of_tile,
    load_group,
    load_numbers,
    load_words,
    parts_of,
    store_tile,
)
from octavo.kernels.cuda.products import GemmFusion
from octavo.kernels.cuda.splits import Tiling, Workspace, arrives_last, cut, sum_parts
from octavo.kernels.cuda.weights import PLANE_K, PLANES, TILE_K, DenseWeight, W4Weight, W8Weight

_NIBBLES_N = 128  # outputs of a program with codes of 4 bits


def multiply_row(
    x: Tensor, weight: DenseWeight | W8Weight, out: Tensor, fusion: GemmFusion
) -> None:
    """Compute out = x @ weight.T, summed in float32, with the fused work before and behind it.

    Args:
        x: [1, K], of the type of the weight, if that is of floats.
        weight: of floats, or of codes with one scale for each row.
        out: [1, N], or [1, N / 2] with an activation, of any float type.
    """
    (_, k), n, norm = x.shape, out.shape[1], fusion.norm
    assert len(x) == len(out) == 1 and x.stride(1) == out.stride(1) == 1
    assert weight.shape == (n if fusion.activation is None else 2 * n, k), (weight.shape, out.shape)
    kind, group, values, scales, mins = parts_of(weight, x.dtype)
    assert group is None and mins is None
    # Of floats of 16 bits, within 5 % of the fastest of twenty choices for each matrix of 8B on an
    # H200; of codes of a byte, the fastest of seven.
    block_n, block_k, stages = (8, 512 // values.element_size(), 4)
    if kind != "float":
        block_n, block_k, stages = (4, 1024, 1)
    _of_rows[(triton.cdiv(n, block_n),)](
        x,
        values,
        values.stride(0),
        scales,
        fusion.bias,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        out,
        n,
        k,
        KIND=kind,
        ACTIVATION=fusion.activation,
        ACCUMULATE=fusion.accumulate,
        BLOCK_N=block_n if fusion.activation is None else 2 * block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=4,
    )


def nibbles_tiling(weight: W4Weight, num_processors: int, *, gated: bool = False) -> Tiling:
    """Choose how ``multiply_row_by_nibbles`` cuts a weight: three programs for each
    multiprocessor."""
    n, k = weight.shape
    return cut(
        n // 2 if gated else n,
        k,
        num_processors,
        block_n=_NIBBLES_N // 2 if gated else _NIBBLES_N,
        block_k=TILE_K,
        programs_each=3,
        part_size=_NIBBLES_N,
        rows=1,
    )


def multiply_row_by_nibbles(
    x: Tensor,
    weight: W4Weight,
    out: Tensor,
    tiling: Tiling,
    workspace: Workspace,
    fusion: GemmFusion,
) -> None:
    """Compute what ``multiply_row`` does, for codes of 4 bits and without a norm.

    Args:
        tiling: from ``nibbles_tiling``, for this weight.
    """
    (_, k), n = x.shape, out.shape[1]
    assert len(x) == len(out) == 1 and x.stride(1) == out.stride(1) == 1
    assert weight.shape == (n if fusion.activation is None else 2 * n, k), (weight.shape, out.shape)
    assert fusion.norm is None
    workspace.check(tiling)
    _of_nibbles[(tiling.num_tiles, tiling.splits)](
        x,
        weight.words,
        weight.words.stride(0),
        weight.scales,
        weight.mins,
        weight.scales.stride(0),
        fusion.bias,
        out,
        workspace.parts,
        workspace.counters,
        n,
        k,
        tiling.split_k,
        GROUP=weight.group,
        ACTIVATION=fusion.activation,
        ACCUMULATE=fusion.accumulate,
        BLOCK_N=_NIBBLES_N,
        BLOCK_K=TILE_K,
        PLANES=PLANES,
        PLANE_K=PLANE_K,
        SPLITS=tiling.splits,
        STAGES=3,
        num_warps=4,
    )


@triton.jit
def _of_rows(
    x,
    weight,
    weight_stride,
    scales,
    bias,
    norm_weight,
    eps,
    out,
    n,
    k,
    KIND: tl.constexpr,  # "float", "s8", "fp8"
    ACTIVATION: tl.constexpr,  # None: no gates
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    columns, exists = columns_of_tile(tile, n, ACTIVATION is not None, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inputs = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + inputs, mask=inputs < k, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += values * values
            values *= tl.load(norm_weight + inputs, mask=inputs < k, other=0.0).to(tl.float32)
        numbers = load_numbers(
            weight, weight_stride, scales, None, 0, columns, exists,
            start, k, tl.float32, KIND, None, BLOCK_K,
        )  # fmt: skip
        sums += numbers * values[None, :]
    made = tl.sum(sums, 1)
    if norm_weight is not None:
        made *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    row = tl.arange(0, 1)
    store_tile(
        made[:, None], tile, n, row, row == 0, scales, bias, out, 0,
        KIND, None, ACTIVATION, ACCUMULATE, 1, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _of_nibbles(
    x,
    words,
    words_stride,
    scales,
    mins,
    groups_stride,
    bias,
    out,
    parts,
    counters,
    n,
    k,
    split_k,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
    PLANE_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    columns, exists = columns_of_tile(tile, n, ACTIVATION is not None, BLOCK_N)
    word = tl.arange(0, PLANE_K)
    sums = tl.zeros([PLANE_K, BLOCK_N], tl.float32)
    end = tl.minimum(k, (split + 1) * split_k)
    for start in tl.range(split * split_k, end, BLOCK_K, num_stages=STAGES):
        packed = load_words(words, start, words_stride, columns, exists, PLANES, BLOCK_K)
        of_group = tl.zeros([PLANE_K, BLOCK_N], tl.float32)
        total = tl.zeros([PLANE_K], tl.float32)
        for plane in tl.static_range(PLANES):
            inputs = start + plane * PLANE_K + word
            values = tl.load(x + inputs, mask=inputs < k, other=0.0).to(tl.float32)
            bits = packed << (19 - 4 * plane) if plane < 5 else packed >> (4 * plane - 19)
            fraction = ((bits & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)
            of_group += fraction * values[:, None]
            total += values
            if (plane + 1) * PLANE_K % GROUP == 0:
                group = (start + plane * PLANE_K) // GROUP
                scale, low = load_group(scales, mins, group, groups_stride, columns, exists)
                sums += of_group * (16.0 * scale) + total[:, None] * (low - 16.0 * scale)
                of_group = tl.zeros([PLANE_K, BLOCK_N], tl.float32)
                total = tl.zeros([PLANE_K], tl.float32)
    made = tl.sum(sums, 0)
    if SPLITS > 1:
        own = parts + tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        stride = tl.num_programs(0) * BLOCK_N
        tl.store(own + split * stride, made)
        if not arrives_last(counters + tile, SPLITS):
            return
        made = sum_parts(own, stride, SPLITS)
    row = tl.arange(0, 1)
    store_tile(
        made[:, None], tile, n, row, row == 0, scales, bias, out, 0,
        "nibbles", GROUP, ACTIVATION, ACCUMULATE, 1, BLOCK_N,
    )  # fmt: skip
