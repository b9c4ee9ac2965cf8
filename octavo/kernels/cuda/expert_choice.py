"""Chooses the experts of tokens and gathers the rows of each expert, on the device and in fixed
shapes.

    logits [T, E] --> ids, weights [T, top_k]       choose: see ``kernels/routing.py``
    ids --> order: pairs of a token and a rank      gather: those of expert 0 first, then of 1, ...
            offsets [E + 1]: where the pairs of each expert begin in it, and the end

A pair is ``token * top_k + rank``. The host does not know how many rows an expert has: a launch has
a program for each tile of rows that may exist, which finds its rows by ``tile_of``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.routing import LEAST_SUM, Routing

_BLOCK = 1024  # pairs that a program processes at a time


def choose(
    logits: Tensor,
    slots: Tensor,
    routing: Routing,
    correction: Tensor | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Choose the experts of tokens, and their weights.

    Args:
        logits: float32 [T, E]; the row stride may be larger.
        slots: int32 [T]. A padding token has slot -1, and goes to no expert (id E).
        correction: float32 [E].
        ids: int32 [T, top_k], contiguous.
        weights: float32 [T, top_k], contiguous; NaN for tokens whose logits have NaN.
    """
    num_tokens, num_experts = logits.shape
    assert num_experts == routing.num_experts and logits.stride(1) == 1
    assert ids.shape == weights.shape == (num_tokens, routing.top_k)
    groups = triton.next_power_of_2(routing.num_groups)
    size = triton.next_power_of_2(num_experts // routing.num_groups)
    _choose[(num_tokens,)](
        logits,
        logits.stride(0),
        slots,
        correction,
        ids,
        weights,
        routing.scale,
        LEAST_SUM,
        NUM_EXPERTS=num_experts,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GROUP_TOP=routing.group_top,
        TOP_K=routing.top_k,
        SCORING=routing.scoring,
        NORMALIZE=routing.normalize,
        GROUPS=groups,
        SIZE=size,
        RANKS=triton.next_power_of_2(routing.top_k),
        num_warps=min(max(groups * size // 128, 1), 4),
    )


def gather(ids: Tensor, order: Tensor, offsets: Tensor) -> None:
    """Gather pairs by expert: ids int32 [T, top_k] --> order int32 [T * top_k], offsets int32
    [E + 1]."""
    assert order.numel() >= ids.numel()
    _gather[(len(offsets),)](ids, order, offsets, ids.numel(), _BLOCK, num_warps=4)


@triton.jit
def _choose(
    logits,
    logits_stride,
    slots,
    correction,
    ids,
    weights,
    factor,
    least_sum,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
):
    """One program handles a token. Each group of experts has SIZE places, some of them unused."""
    OF_GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS * SIZE)
    expert = place // SIZE * OF_GROUP + place % SIZE
    exists = (place % SIZE < OF_GROUP) & (place // SIZE < NUM_GROUPS)
    values = tl.load(logits + token * logits_stride + expert, mask=exists, other=float("-inf"))
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, mask=exists, other=0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = _in_best_groups(choice, TOP_GROUPS, GROUP_TOP, GROUPS, SIZE)

    rank = tl.arange(0, RANKS)
    chosen = tl.zeros([RANKS], tl.int32)
    weight = tl.zeros([RANKS], tl.float32)
    for each in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        chosen = tl.where(rank == each, best // SIZE * OF_GROUP + best % SIZE, chosen)
        score = tl.sum(tl.where(place == best, scores, 0.0), 0)
        weight = tl.where(rank == each, score, weight)
        choice = tl.where(place == best, float("-inf"), choice)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + least_sum)
    # NaN if one of the logits is; the choice may have skipped it.
    weight = weight * factor + tl.sum(tl.where(exists, values, 0.0) * 0.0, 0)
    # The choice among NaNs may be an unused place.
    chosen = tl.minimum(chosen, NUM_EXPERTS - 1)
    if tl.load(slots + token) < 0:
        chosen = tl.full([RANKS], NUM_EXPERTS, tl.int32)
    tl.store(ids + token * TOP_K + rank, chosen, mask=rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, weight, mask=rank < TOP_K)


@triton.jit
def _in_best_groups(
    choice,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The choice, with -inf for experts of other groups."""
    by_group = tl.reshape(choice, [GROUPS, SIZE])
    rest, member = by_group, tl.arange(0, SIZE)
    worth = tl.zeros([GROUPS], tl.float32)
    for _ in tl.static_range(GROUP_TOP):
        worth += tl.max(rest, 1)
        best = tl.argmax(rest, 1)
        rest = tl.where(member[None, :] == best[:, None], float("-inf"), rest)
    group = tl.arange(0, GROUPS)
    is_best = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best_group = tl.argmax(worth, 0)
        is_best = tl.where(group == best_group, 1, is_best)
        worth = tl.where(group == best_group, float("-inf"), worth)
    by_group = tl.where(is_best[:, None] == 1, by_group, float("-inf"))
    return tl.reshape(by_group, [GROUPS * SIZE])


@triton.jit(do_not_specialize=["num_pairs"])
def _gather(ids, order, offsets, num_pairs, BLOCK: tl.constexpr):
    """One program handles an expert, and one the end of all."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        before += (tl.load(ids + pair, mask=pair < num_pairs, other=1 << 30) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(offsets + expert, place)
    if expert == tl.num_programs(0) - 1:
        return
    for start in tl.range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_own = tl.load(ids + pair, mask=pair < num_pairs, other=1 << 30) == expert
        count = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + count - 1, pair, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def tile_of(offsets, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert of a tile of rows, the tile's first place in the order, and the end of the expert's
    rows.

    If there are fewer tiles, the end is not behind the first place.
    """
    expert = tl.arange(0, EXPERTS)
    exists = expert < NUM_EXPERTS
    start = tl.load(offsets + expert, mask=exists, other=0)
    end = tl.load(offsets + expert + 1, mask=exists, other=0)
    num_tiles = (end - start + ROWS - 1) // ROWS
    tiles_to_here = tl.cumsum(num_tiles, 0)
    tiles_before = tiles_to_here - num_tiles
    is_it = (tiles_before <= tile) & (tile < tiles_to_here)
    first = tl.sum(tl.where(is_it, start + (tile - tiles_before) * ROWS, 0), 0)
    return tl.sum(tl.where(is_it, expert, 0), 0), first, tl.sum(tl.where(is_it, end, 0), 0)
