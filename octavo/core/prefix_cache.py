"""Reuse of full KV blocks between requests, as a trie whose edges are whole blocks.

    salt "" ── (The quick brown fox) b3 ── (jumps over the lazy) b7
                                       └── (runs from the slow) b9
    salt "k" ── (The quick brown fox) b4          another tenant shares nothing

One node is one full block of KV, and a path from the root spells the tokens before it: KV depends
on all of them, so only whole prefixes can be shared. Blocks are freed tail first, so the least
recently used block of the free list is always a leaf: plain LRU needs no timestamps and no splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PrefixCache(Protocol):
    """What the block manager asks. Reference counts are the block manager's own business."""

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> list[int]:
        """Blocks that hold the KV of the longest known prefix, at most ``limit`` tokens of it.

        Changes nothing. The answer is good until the next ``publish`` or ``forget``.
        """
        ...

    def publish(
        self, parent_block: int | None, tokens: tuple[int, ...], block_id: int, salt: str
    ) -> int:
        """Offer a full, computed block that follows ``parent_block`` (None: starts a prompt).

        Returns the block that now stands for this content: ``block_id``, or the one that was
        there before. In the second case the caller takes that one and lets its own go.
        """
        ...

    def forget(self, block_id: int) -> None:
        """Drop a block, which no longer holds what it held. It must be a leaf."""
        ...

    def __contains__(self, block_id: int) -> bool: ...


class _Node:
    __slots__ = ("block_id", "children", "parent", "tokens")

    def __init__(self, block_id: int, tokens: tuple[int, ...], parent: _Node | None):
        self.block_id = block_id
        self.tokens = tokens
        self.parent = parent
        # Keyed by the token ids themselves: a dict compares keys for equality after hashing, so
        # a hash collision can cost time and can never serve the KV of other tokens.
        self.children: dict[tuple[int, ...], _Node] = {}


class RadixPrefixCache:
    """The block trie. ``block_size`` is the number of tokens of an edge."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> list[int]:
        node = self._roots.get(salt)
        matched: list[int] = []
        size = self.block_size
        for start in range(0, min(limit, len(token_ids)) - size + 1, size):
            node = node and node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            matched.append(node.block_id)
        return matched

    def publish(
        self, parent_block: int | None, tokens: tuple[int, ...], block_id: int, salt: str
    ) -> int:
        if parent_block is None:
            parent = self._roots.setdefault(salt, _Node(-1, (), None))
        else:
            parent = self._nodes[parent_block]
        node = _Node(block_id, tokens, parent)
        known = parent.children.setdefault(tokens, node)
        if known is node:  # as nearly always
            assert block_id not in self._nodes, "a block can hold one content only"
            self._nodes[block_id] = node
        return known.block_id

    def forget(self, block_id: int) -> None:
        node = self._nodes.pop(block_id)
        assert not node.children, "blocks are freed tail first, so the oldest is a leaf"
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            # A salt that is not used any more leaves nothing behind.
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}

    def content(self, block_id: int) -> list[int]:
        """All tokens from the start of the prompt to the end of the block. For audits."""
        tokens: list[int] = []
        node: _Node | None = self._nodes[block_id]
        while node is not None:
            tokens[:0] = node.tokens
            node = node.parent
        return tokens


class NoPrefixCache:
    """Remembers nothing: every request computes its whole prompt."""

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> list[int]:
        return []

    def publish(
        self, parent_block: int | None, tokens: tuple[int, ...], block_id: int, salt: str
    ) -> int:
        return block_id

    def forget(self, block_id: int) -> None:
        raise AssertionError("nothing was published")

    def __contains__(self, block_id: int) -> bool:
        return False
