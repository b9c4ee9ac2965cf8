"""Builds Medusa's static draft tree of the paths that are accepted most often.

A node is the path to it: (0, 2) is the third token of the second head after the first token of the
first head. Heads do not see each other's tokens, so a path is accepted about as often as the
product of its accuracies (Cai et al. 2024, "Medusa", arXiv 2401.10774), and adds as much to the
tokens of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Path = tuple[int, ...]


def grow(accuracy: Sequence[Sequence[float]], size: int) -> list[Path]:
    """The ``size`` nodes that add the most expected tokens, or fewer, the best first.

    ``accuracy[h][i]``: the share of positions at which the token of rank i of head h is right,
    falling with i. Parents come before their children, so any prefix of the list is the best tree
    of its size.
    """
    nodes: list[Path] = []
    waiting: list[tuple[float, Path]] = []

    def offer(parent: float, path: Path) -> None:
        head, rank = len(path) - 1, path[-1]
        if head < len(accuracy) and rank < len(accuracy[head]):
            value = parent * accuracy[head][rank]
            if value > 0:
                heapq.heappush(waiting, (-value, path))

    offer(1.0, (0,))
    while waiting and len(nodes) < size:
        value, path = heapq.heappop(waiting)
        nodes.append(path)
        offer(-value, (*path, 0))
        offer(-value / accuracy[len(path) - 1][path[-1]], (*path[:-1], path[-1] + 1))
    return nodes
