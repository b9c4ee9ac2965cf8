"""Mixtures of experts in Triton: each expert multiplies the rows that are routed to it.

    choose, gather                      expert_choice.py
    x --> activation(gate) * up         a row for each pair of a token and one of its experts,
                                        those of an expert one after the other
      --> down                          each row to the place of its pair
      --> weighted, summed by rank      + residual

The matrices of all experts are stacked in one: an expert's outputs are rows of it, so the functions
that read a tile of any weight (``linear.py``) read one of an expert's. A tile has rows of one
expert only; sums have one order, whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import gated
from octavo.kernels.cuda.expert_choice import choose, gather, tile_of
from octavo.kernels.cuda.linear import (
    BLOCK_N,
    Matrix,
    columns_of_tile,
    finished,
    gates_and_ups,
    parts_of,
    sums_of_tile,
)
from octavo.kernels.cuda.ops import ExpertLayer
from octavo.kernels.cuda.weights import PLANES, TILE_K, DenseWeight, W4Weight, W8Weight
from octavo.kernels.routing import Routing

PIECE_TOKENS = 4096  # more would take too much memory between the products
_FEWEST_ROWS, _MOST_ROWS, _INVARIANT_ROWS = 16, 64, 32
_BLOCK = 1024  # values of a row summed at a time


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tile sizes of a product: rows of x and of the weight in a program, and inputs that it has at
    a time."""

    rows: int
    block_n: int
    block_k: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer, for the memory between its launches."""

    routing: Routing
    inner: int  # F
    width: int  # K


class ExpertProducts:
    """Runs the experts of one stream, with memory for layers that are declared in advance.

    Args:
        dtype: of activations.
        is_invariant: tiles have one size, so that a row has the same bits in any batch.
    """

    def __init__(
        self,
        sizes: Iterable[ExpertSizes],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        is_invariant: bool = False,
    ):
        self._is_invariant = is_invariant
        tokens, pairs, inner, made, experts = min(max_tokens, PIECE_TOKENS), 0, 0, 0, 0
        for each in sizes:
            of_layer = tokens * each.routing.top_k
            pairs, experts = max(pairs, of_layer), max(experts, each.routing.num_experts)
            inner, made = max(inner, of_layer * each.inner), max(made, of_layer * each.width)
        self._ids, self._order, self._offsets = (
            torch.zeros(count, dtype=torch.int32, device=device)
            for count in (pairs, pairs, experts + 1)
        )
        self._weights = torch.empty(pairs, dtype=torch.float32, device=device)
        self._inner, self._made = (
            torch.empty(count, dtype=dtype, device=device) for count in (inner, made)
        )

    def run(
        self,
        x: Tensor,
        logits: Tensor,
        slots: Tensor,
        layer: ExpertLayer,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """Compute :meth:`octavo.kernels.cuda.ops.StepOps.run_experts`, with ``slots`` int32 [T] of
        tokens."""
        for start in range(0, len(x), PIECE_TOKENS):
            rows = slice(start, start + PIECE_TOKENS)
            before = None if residual is None else residual[rows]
            self._piece(x[rows], logits[rows], slots[rows], layer, before, out[rows])

    def _piece(
        self,
        x: Tensor,
        logits: Tensor,
        slots: Tensor,
        layer: ExpertLayer,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        (num_tokens, width), routing = x.shape, layer.routing
        pairs = num_tokens * routing.top_k
        ids, weights = (
            memory[:pairs].view(num_tokens, routing.top_k) for memory in (self._ids, self._weights)
        )
        order, offsets = self._order[:pairs], self._offsets[: routing.num_experts + 1]
        inner_width = layer.gate_up.shape[0] // (2 * routing.num_experts)
        inner = self._inner[: pairs * inner_width].view(pairs, inner_width)
        made = self._made[: pairs * width].view(pairs, width)
        choose(logits, slots, routing, layer.correction, ids, weights)
        gather(ids, order, offsets)
        self._multiply(x, layer.gate_up, layer.gate_up_bias, order, offsets, layer, inner)
        self._multiply(inner, layer.down, layer.down_bias, order, offsets, layer, made)
        sum_ranks(made, weights, residual, out)

    def _multiply(
        self,
        x: Tensor,
        weight: object,
        bias: Tensor | None,
        order: Tensor,
        offsets: Tensor,
        layer: ExpertLayer,
        out: Tensor,
    ) -> None:
        assert isinstance(weight, DenseWeight | W4Weight | W8Weight)
        is_gated = weight is layer.gate_up
        tiles = tiles_of(weight, len(order), layer.routing, self._is_invariant)
        activation = layer.activation if is_gated else None
        multiply(x, weight, bias, order, offsets, layer.routing, activation, out, tiles)


def tiles_of(
    weight: Matrix, num_pairs: int, routing: Routing, is_invariant: bool = False
) -> ExpertTiles:
    """Tile sizes for ``num_pairs`` pairs, assuming that they are spread evenly over experts."""
    each = triton.next_power_of_2(triton.cdiv(num_pairs, routing.num_experts))
    rows = _INVARIANT_ROWS if is_invariant else min(max(each, _FEWEST_ROWS), _MOST_ROWS)
    if not isinstance(weight, DenseWeight):
        return ExpertTiles(rows, BLOCK_N, TILE_K, 4 if rows < _MOST_ROWS else 3)
    if rows < _MOST_ROWS or weight.values.element_size() > 2:
        return ExpertTiles(rows, BLOCK_N, TILE_K // 2, 4)
    return ExpertTiles(rows, 2 * BLOCK_N, TILE_K // 2, 3)


def multiply(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    routing: Routing,
    activation: str | None,
    out: Tensor,
    tiles: ExpertTiles,
) -> None:
    """Multiply the rows of each expert with its matrix, in float32, rounded once.

    Args:
        x: [T, K], where a pair has the row of its token, if there is an activation; else [pairs, K]
            in the order of pairs.
        weight: [E N, K], or [E 2 N, K] with gates before ups.
        order, offsets: from ``gather``.
        out: [pairs, N]: in the order of pairs with an activation, else at the place of each pair.
    """
    num_pairs, n = out.shape
    num_experts, k = routing.num_experts, x.shape[1]
    halves = 1 if activation is None else 2
    assert weight.shape == (num_experts * halves * n, k), (weight.shape, x.shape, out.shape)
    assert x.stride(1) == out.stride(1) == 1 and len(offsets) == num_experts + 1
    kind, group, values, scales, mins = parts_of(weight, x.dtype)
    num_tiles = num_pairs // tiles.rows + min(num_pairs, num_experts)
    _multiply[(num_tiles, triton.cdiv(halves * n, tiles.block_n))](
        x,
        x.stride(0),
        values,
        values.stride(0),
        scales,
        mins,
        0 if scales is None else scales.stride(0),
        bias,
        order,
        offsets,
        out,
        n,
        k,
        KIND=kind,
        GROUP=group,
        ACTIVATION=activation,
        TOP_K=routing.top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=tiles.rows,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PLANES=PLANES,
        STAGES=tiles.num_stages,
        num_warps=4,
    )


def sum_ranks(made: Tensor, weights: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Compute out [T, K], the sum of made [T * top_k, K] by weights [T, top_k], in the order of
    ranks, plus the residual [T, K]."""
    num_tokens, top_k = weights.shape
    width = out.shape[1]
    _sum_ranks[(num_tokens, triton.cdiv(width, _BLOCK))](
        made,
        weights,
        residual,
        0 if residual is None else residual.stride(0),
        out,
        out.stride(0),
        width,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _multiply(
    x,
    x_stride,
    weight,
    weight_stride,
    scales,
    mins,
    groups_stride,
    bias,
    order,
    offsets,
    out,
    n,
    k,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program handles a tile of rows that may exist, and a tile of outputs.

    Programs of the same outputs follow each other, so that an expert's second tile finds the
    weights in the cache.
    """
    expert, first, end = tile_of(offsets, tl.program_id(0), NUM_EXPERTS, EXPERTS, ROWS)
    if first >= end:
        return
    place = first + tl.arange(0, ROWS)
    row_exists = place < end
    pair = tl.load(order + place, mask=row_exists, other=0)
    # Gated rows are read at their token and written in order; the second product does the reverse.
    source = place if ACTIVATION is None else pair // TOP_K
    target = pair if ACTIVATION is None else place
    GATED: tl.constexpr = ACTIVATION is not None
    of_expert, column_exists = columns_of_tile(tl.program_id(1), n, GATED, BLOCK_N)
    columns = expert * n * (2 if GATED else 1) + of_expert

    sums = sums_of_tile(
        x + source.to(tl.int64) * x_stride, row_exists,
        weight, weight_stride, scales, mins, groups_stride, columns, column_exists,
        0, k, k, KIND, GROUP, ROWS, BLOCK_N, BLOCK_K, PLANES, STAGES,
    )  # fmt: skip
    sums = finished(sums, scales, bias, columns, column_exists, KIND, GROUP)
    output = of_expert
    if GATED:
        gates, ups = gates_and_ups(sums, BLOCK_N, ROWS)
        sums = gated(gates, ups, ACTIVATION)
        output, column_exists = columns_of_tile(tl.program_id(1), n, False, BLOCK_N // 2)
    places = out + target.to(tl.int64)[None, :] * n + output[:, None]
    mask = row_exists[None, :] & column_exists[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_ranks(
    made,
    weights,
    residual,
    residual_stride,
    out,
    out_stride,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        values = tl.load(made + pair * width + columns, mask=exists, other=0.0)
        total += values.to(tl.float32) * tl.load(weights + pair)
    if residual is not None:
        before = tl.load(residual + token * residual_stride + columns, mask=exists, other=0.0)
        total += before.to(tl.float32)
    place = out + token * out_stride + columns
    tl.store(place, total.to(out.dtype.element_ty), mask=exists)
