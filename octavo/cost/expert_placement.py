"""Placement of experts on ranks by how many tokens each of them got, with copies of the busiest.

As in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB), each layer for itself: free places go
one by one to the expert whose copies have most to do each. Then the copies, the busiest first, go
each to the rank with least to do that has a place left, and not the same expert already. A layer
for which this is no better than equal runs of experts has those.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from octavo.base.errors import ConfigError
from octavo.kernels.expert_places import ExpertPlaces, LayerPlaces, deal_out


def place_experts(
    loads: Sequence[Sequence[int]], num_ranks: int, slots: int | None = None
) -> ExpertPlaces:
    """Return which ranks have which experts.

    Args:
        loads: for each layer, the tokens that each of its experts got.
        slots: experts of a layer that a rank has at most; None: as few as there can be.

    Raises:
        ConfigError: the ranks are more than the experts, or have no place for all of them.
    """
    return ExpertPlaces(tuple(_place_layer(layer, num_ranks, slots) for layer in loads))


def imbalance(loads: Sequence[Sequence[int]], places: ExpertPlaces, num_ranks: int) -> float:
    """Return how much more the busiest rank of a layer has to do than the mean, over all layers:
    1.0 if all have the same. Copies of an expert count as if they shared its tokens evenly."""
    pairs = list(zip(loads, places.layers, strict=True))
    total = sum(map(sum, loads))
    busiest = sum(max(_rank_loads(*pair, num_ranks)) for pair in pairs)
    return busiest * num_ranks / total if total else 1.0


def _rank_loads(loads: Sequence[int], places: LayerPlaces, num_ranks: int) -> list[float]:
    sums = [0.0] * num_ranks
    for load, ranks in zip(loads, places, strict=True):
        for rank in ranks:
            sums[rank] += load / len(ranks)
    return sums


def _place_layer(loads: Sequence[int], num_ranks: int, slots: int | None) -> LayerPlaces:
    num_experts = len(loads)
    least = -(-num_experts // num_ranks)
    if num_ranks > num_experts:
        raise ConfigError(
            f"{num_ranks} ranks cannot share {num_experts} experts, one each at least"
        )
    slots = least if slots is None else min(slots, num_experts)
    if slots < least:
        raise ConfigError(
            f"{num_ranks} ranks of {slots} experts a layer cannot have all {num_experts}: {least} "
            "are the fewest"
        )
    even = deal_out(num_experts, num_ranks)
    packed = _pack(loads, _copies(loads, num_ranks * slots, num_ranks), num_ranks, slots)
    return min(even, packed, key=lambda places: max(_rank_loads(loads, places, num_ranks)))


def _copies(loads: Sequence[int], num_places: int, num_ranks: int) -> list[int]:
    """Return the number of copies of each expert, which is at most that of ranks."""
    copies = [1] * len(loads)
    queue: list[tuple[float, int]] = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(num_places - len(loads)):
        if not queue or queue[0][0] == 0:
            break
        _, expert = heapq.heappop(queue)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(queue, (-loads[expert] / copies[expert], expert))
    return copies


def _pack(
    loads: Sequence[int], copies: Sequence[int], num_ranks: int, slots: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each expert. A copy that only ranks with another one have room for is
    left out."""
    placed: list[list[int]] = [[] for _ in loads]
    work, free = [0.0] * num_ranks, [slots] * num_ranks
    each = [(loads[e] / n, e) for e, n in enumerate(copies) for _ in range(n)]
    for load, expert in sorted(each, key=lambda one: (-one[0], one[1])):
        able = [r for r in range(num_ranks) if free[r] and r not in placed[expert]]
        if able:
            rank = min(able, key=lambda r: (work[r], -free[r], r))
            placed[expert].append(rank)
            work[rank] += load
            free[rank] -= 1
    return tuple(tuple(sorted(ranks)) for ranks in placed)
