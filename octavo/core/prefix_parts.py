"""The largest parts of a prefix cache, for a picture of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, Protocol


class TrieNode(Protocol):
    """One block of a trie."""

    children: dict[Any, Any]
    num_hits: int


# The index of the part before it (-1: it starts prompts), the number of its blocks, their number
# with all that follows, and the requests that found it or something that follows.
PrefixPart = tuple[int, int, int, int]


def largest_parts(roots: Iterable[TrieNode], most: int) -> list[PrefixPart]:
    """Return stretches of blocks without a branch, those first that are largest with all that
    follows; each after the one that it follows. Takes time in proportion to the blocks."""
    stretches = _stretches(roots)
    # A stretch that follows another is smaller than it, each counted with all that follows.
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


def _stretches(roots: Iterable[TrieNode]) -> list[_Stretch]:
    """Return all stretches, each after the one that it follows."""
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
