"""The largest parts of a prefix cache, for a picture of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
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
    stretches = _stretches(roots)
    # Whatever follows a stretch is smaller with all that follows than that with it.
    largest = nsmallest(most, range(len(stretches)), key=lambda index: -stretches[index].size)
    places = {-1: -1} | {index: place for place, index in enumerate(largest)}
    chosen = [stretches[index] for index in largest]
    return [(places[it.before], it.length, it.size, it.hits) for it in chosen]


@dataclass(slots=True)
class _Stretch:
    before: int  # the stretch that it follows, or -1
    length: int
    size: int
    hits: int


def _stretches(roots: Iterable[Node]) -> list[_Stretch]:
    """All of them, each after the one that it follows."""
    stretches: list[_Stretch] = []
    begins = [(child, -1) for root in roots for child in root.children.values()]
    for node, before in begins:  # which grows meanwhile
        length, hits, children = 1, node.num_hits, node.children
        while len(children) == 1:
            (node,) = children.values()
            length, hits, children = length + 1, hits + node.num_hits, node.children
        begins.extend([(child, len(stretches)) for child in children.values()])
        stretches.append(_Stretch(before, length, length, hits))
    for it in reversed(stretches):
        if it.before >= 0:
            stretches[it.before].size += it.size
            stretches[it.before].hits += it.hits
    return stretches
