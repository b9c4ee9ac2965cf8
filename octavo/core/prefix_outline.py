"""The largest parts of a prefix cache, for a picture of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, Protocol


class Node(Protocol):
    """One block of a trie."""

    children: dict[Any, Any]
    num_hits: int


# The index of the part before it (-1: it starts prompts), its blocks, those of it and of all that
# follows, and the requests that found it or something that follows.
Part = tuple[int, int, int, int]


def outline(roots: Iterable[Node], most: int) -> list[Part]:
    """Stretches of blocks without a branch, the largest with all that follows them first; each
    after the one that it follows. Takes time in proportion to the blocks."""
    begins = [child for root in roots for child in root.children.values()]
    sizes, hits = _totals(begins)
    parts: list[Part] = []
    heap = [(-sizes[id(node)], number, -1, node) for number, node in enumerate(begins)]
    heap.sort()
    number = len(heap)  # that tells apart what is as large
    while heap and len(parts) < most:
        _, _, parent, node = heappop(heap)
        last, length = node, 1
        while len(last.children) == 1:
            (last,) = last.children.values()
            length += 1
        for child in last.children.values():
            heappush(heap, (-sizes[id(child)], number, len(parts), child))
            number += 1
        parts.append((parent, length, sizes[id(node)], hits[id(node)]))
    return parts


def _totals(begins: Collection[Node]) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Blocks, and hits, of each node and all after it, by the node's ``id``."""
    order = list(begins)  # parents before their children
    for node in order:
        order.extend(node.children.values())
    sizes: dict[int, int] = {}
    hits: dict[int, int] = {}
    for node in reversed(order):
        after = node.children.values()
        sizes[id(node)] = 1 + sum([sizes[id(child)] for child in after])
        hits[id(node)] = node.num_hits + sum([hits[id(child)] for child in after])
    return sizes, hits
