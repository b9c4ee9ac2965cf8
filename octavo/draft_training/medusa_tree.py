"""The static tree of Medusa's guesses: which combinations of which guesses are worth a row.

A node is the path to it: (0, 2) is the third guess of the second head after the first guess of the
first. Heads do not see each other, so a path is right about as often as the product of its guesses
says (Cai et al. 2024, "Medusa", arXiv 2401.10774); each node adds as much to the tokens of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Path = tuple[int, ...]


def grow(accuracy: Sequence[Sequence[float]], size: int) -> list[Path]:
    """So many nodes or fewer, those that add most, from the best on.

    ``accuracy[h][i]``: how often guess i of head h is right; later guesses no more often than
    earlier ones. A parent comes before its children, so any beginning of the list is a tree, and
    the best of its size.
    """
    nodes: list[Path] = []
    waiting: list[tuple[float, Path]] = []

    def offer(parent: float, path: Path) -> None:
        head, guess = len(path) - 1, path[-1]
        if head < len(accuracy) and guess < len(accuracy[head]):
            value = parent * accuracy[head][guess]
            if value > 0:
                heapq.heappush(waiting, (-value, path))

    offer(1.0, (0,))
    while waiting and len(nodes) < size:
        value, path = heapq.heappop(waiting)
        nodes.append(path)
        offer(-value, (*path, 0))
        offer(-value / accuracy[len(path) - 1][path[-1]], (*path[:-1], path[-1] + 1))
    return nodes
