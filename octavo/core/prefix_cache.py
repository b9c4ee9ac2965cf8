"""Reuse of full KV blocks between requests, as a trie whose edges are whole blocks.

    salt "" ── (The quick brown fox) b3 ── (jumps over the lazy) b7
                                       └── (runs from the slow) b9
    salt "k" ── (The quick brown fox) b4          another tenant shares nothing

One node is one full block of KV, and a path from the root spells the tokens before it: KV depends
on all of them, so only whole prefixes can be shared. Blocks are freed tail first, so the least
recently used block of the free list is a leaf: plain LRU needs no timestamps and no splits. Blocks
that a request with a ``SinkWindow`` gave back leave gaps: those that follow cannot be matched until
they are back.

Where layers with windows have tables of their own (``kv_tables.py``), a node is one block of each
group, and some may be missing: a window gives back the first blocks of a sequence, and sees the
last ones. A prefix is then known as far as each group has the blocks that its window sees at the
end.

For a model with recurrent layers (``state_slots.py``) a node may also have the state at its end,
and a prefix is known up to a node that has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from octavo.core.block_store import next_key, part_key, root_key
from octavo.core.kv_tables import GONE, ONE_TABLE, Windows, served_counts
from octavo.core.prefix_parts import PrefixPart, TrieNode, largest_parts
from octavo.core.state_types import NO_STATE

# Number of evicted blocks that are remembered as such.
_REMEMBERED = 1 << 16


class MissReason(Enum):
    """The reason why no more of a prompt was found. ``OTHER_SALT`` is for the operator alone to
    know."""

    BLOCK_BORDER = "block_border"  # the rest is no whole block, or the last token
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    OTHER_SALT = "other_salt"  # under other salts, prompts begin like that
    LEFT_BEHIND = "left_behind"  # it is known, but blocks that a window would see are gone
    NO_STATE = "no_state"  # it is known, but no state that recurrent layers would go on from
    SINK_WINDOW = "sink_window"  # the request does not attend to all of its tokens from there on
    PROMPT_LOGPROBS = "prompt_logprobs"  # all of it is to be computed
    POOLING = "pooling"  # the same, for a vector of all its tokens
    OFF = "off"


class PrefixCache(Protocol):
    """A prefix cache, as the block manager calls it; by default one that remembers nothing.

    Reference counts are the manager's own business.
    """

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Sequence[Sequence[int]]:
        """Return the longest known prefix, at most ``limit`` tokens of it, as blocks that follow
        each other: of each the block of every group, or ``GONE`` where the group's window does not
        see it.

        Changes nothing. The answer holds until the next ``publish`` or ``forget``.
        """
        return ()

    def path(self, token_ids: Sequence[int], limit: int, salt: str) -> Sequence[Sequence[int]]:
        """Return what ``match`` returns and what is still there behind it: any block may be
        ``GONE``."""
        return ()

    def why_no_more(
        self, token_ids: Sequence[int], num_found: int, limit: int, salt: str
    ) -> MissReason:
        """Return the reason why ``match`` found no more than ``num_found`` tokens."""
        return MissReason.OFF

    def publish(
        self,
        parent_block: int | None,
        tokens: Sequence[tuple[int, ...]],
        block_ids: Sequence[Sequence[int]],
        salt: str,
    ) -> Sequence[Sequence[int]]:
        """Offer full, computed blocks that follow each other: of each its tokens, and the block of
        every group, or ``GONE``. ``parent_block`` is the first group's block before them (None:
        they start a prompt).

        Returns the blocks that now stand for this content: ``block_ids``, or those that were there
        before. In the second case the caller takes these and releases its own.
        """
        return block_ids

    def forget(self, block_id: int) -> int:
        """Drop a block whose content is about to be overwritten. Returns the slot of the state that
        goes with it, or NO_STATE."""
        raise AssertionError("nothing was published")

    def __contains__(self, block_id: int) -> bool:
        return False

    def count_hit(self, block_id: int) -> None:
        """Count a request that found the prefix which ends with this known block."""
        raise AssertionError("nothing was published")

    @property
    def roots(self) -> Iterable[TrieNode]:
        """The roots of its tries, for a picture of it."""
        return ()

    def largest_parts(self, most: int) -> Sequence[PrefixPart]:
        """Return the largest parts of the cache, for a picture of it."""
        return ()

    def key_of(self, block_id: int) -> bytes:
        """Return the key of a known block (``block_store.part_key``)."""
        raise AssertionError("nothing was published")

    def key_before(self, block_id: int) -> bytes | None:
        """Return the key of the block without which a known one is of no use: the one before it, in
        a group that sees all positions. None for the first of a prompt, and in groups with a
        window."""
        raise AssertionError("nothing was published")

    def keep_state(self, block_id: int, slot: int) -> bool:
        """Offer the state at the end of a block of the first group. Returns False if the block has
        one already."""
        return False

    def state_of(self, block_id: int) -> int:
        """Return the slot of the state at the end of a block of the first group, or NO_STATE."""
        return NO_STATE

    def has_state(self, slot: int) -> bool:
        """Return whether a slot holds a state that is kept."""
        return False

    def forget_state(self, slot: int) -> None:
        """Drop a state that is kept, but not its blocks."""
        raise AssertionError("no state was kept")


class NoPrefixCache(PrefixCache):
    """A cache that remembers nothing: every request computes its whole prompt."""


class _Node:
    __slots__ = (
        "block_ids",
        "children",
        "key",
        "num_hits",
        "number",
        "parent",
        "state",
        "tokens",
    )

    def __init__(
        self, block_ids: list[int], tokens: tuple[int, ...], parent: _Node | None, number: int
    ):
        self.number = number  # hash of its path from the root; others may have the same
        self.block_ids = block_ids  # of each group
        self.tokens = tokens
        self.parent = parent
        self.key = b""  # made when it is first asked for; a root always has one
        self.state = NO_STATE
        self.num_hits = 0  # requests that found what ends here, and nothing longer
        # Keyed by the token ids themselves: a dict compares keys for equality after hashing, so
        # a hash collision can cost time and can never serve the KV of other tokens.
        self.children: dict[tuple[int, ...], _Node] = {}


class RadixPrefixCache:
    """A prefix cache that is a trie of blocks.

    Args:
        block_size: the number of tokens of an edge.
        windows: the block manager's groups of layers.
        needs_states: a prefix is of no use without the state at its end.
    """

    def __init__(
        self, block_size: int, windows: Windows = ONE_TABLE, *, needs_states: bool = False
    ):
        self.block_size = block_size
        self._windows = tuple(windows)
        self._needs_states = needs_states
        self._states: dict[int, _Node] = {}  # by slot
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._evicted: OrderedDict[int, None] = OrderedDict()  # numbers of nodes that are no more
        self._num_begun: dict[tuple[int, ...], int] = {}  # roots with such a first block

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> list[list[int]]:
        path = self.path(token_ids, limit, salt)
        return path[: self._num_served(path, self._needs_states)]

    def path(self, token_ids: Sequence[int], limit: int, salt: str) -> list[list[int]]:
        node, size = self._roots.get(salt), self.block_size
        path: list[list[int]] = []
        for start in range(0, min(limit, len(token_ids)) - size + 1, size):
            node = node and node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            path.append(node.block_ids)
        return path

    def why_no_more(
        self, token_ids: Sequence[int], num_found: int, limit: int, salt: str
    ) -> MissReason:
        size, node, number = self.block_size, self._roots.get(salt), hash(salt)
        known: list[list[int]] = []
        for start in range(0, min(limit, len(token_ids)) - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            number = hash((number, tokens))
            node = node and node.children.get(tokens)
            if node is None:
                if number in self._evicted:
                    return MissReason.EVICTED
                is_begun = start == 0 and tokens in self._num_begun
                return MissReason.OTHER_SALT if is_begun else MissReason.NEVER_SEEN
            if start >= num_found and node.block_ids[0] == GONE and self._windows[0] is None:
                return MissReason.EVICTED
            known.append(node.block_ids)
        if num_found + size > min(limit, len(token_ids)):
            return MissReason.BLOCK_BORDER
        lacks_state = self._num_served(known, needs_states=False) * size > num_found
        return MissReason.NO_STATE if lacks_state else MissReason.LEFT_BEHIND

    def _num_served(self, path: Sequence[Sequence[int]], needs_states: bool) -> int:
        """Return how many of these blocks every group has, as far as it sees them; with a state at
        their end, where one is needed."""
        if self._windows == ONE_TABLE and not needs_states:
            return next((i for i, row in enumerate(path) if row[0] == GONE), len(path))
        rows = ([block_id != GONE for block_id in row] for row in path)
        served = served_counts(self._windows, rows, self.block_size)
        fits = (n for n in served if not needs_states or self._has_state_after(path[n - 1][0]))
        return max(fits, default=0)

    def _has_state_after(self, block_id: int) -> bool:
        return block_id != GONE and self.state_of(block_id) != NO_STATE

    def publish(
        self,
        parent_block: int | None,
        tokens: Sequence[tuple[int, ...]],
        block_ids: Sequence[Sequence[int]],
        salt: str,
    ) -> list[list[int]]:
        if parent_block is None:
            node = self._roots.get(salt) or self._new_root(salt)
        else:
            node = self._nodes[parent_block]
        known = []
        for edge, row in zip(tokens, block_ids, strict=True):
            # Nearly always it is new.
            node = node.children.get(edge) or self._add(node, edge, len(row))
            self._fill(node, row)
            known.append(node.block_ids)
        return known

    def _fill(self, node: _Node, row: Sequence[int]) -> None:
        """Take the blocks that a node lacks."""
        known = node.block_ids
        for group, block_id in enumerate(row):
            if known[group] == GONE != block_id:
                assert block_id not in self._nodes, "a block can hold one content only"
                known[group] = block_id
                self._nodes[block_id] = node

    def _new_root(self, salt: str) -> _Node:
        root = self._roots[salt] = _Node([], (), None, hash(salt))
        root.key = root_key(salt)
        return root

    def key_of(self, block_id: int) -> bytes:
        node = self._nodes[block_id]
        return part_key(self._key_of(node), node.block_ids.index(block_id))

    def key_before(self, block_id: int) -> bytes | None:
        node = self._nodes[block_id]
        group, before = node.block_ids.index(block_id), node.parent
        if self._windows[group] is not None or before is None or before.parent is None:
            return None
        return part_key(self._key_of(before), group)

    def _key_of(self, last: _Node) -> bytes:
        node: _Node | None = last
        path: list[_Node] = []
        while node is not None and not node.key:
            path.append(node)
            node = node.parent
        assert node is not None
        for child in reversed(path):
            child.key = next_key(node.key, child.tokens)
            node = child
        return node.key

    def _add(self, parent: _Node, tokens: tuple[int, ...], num_groups: int) -> _Node:
        number = hash((parent.number, tokens))
        node = parent.children[tokens] = _Node([GONE] * num_groups, tokens, parent, number)
        self._evicted.pop(number, None)
        if parent.parent is None:
            self._num_begun[tokens] = self._num_begun.get(tokens, 0) + 1
        return node

    def forget(self, block_id: int) -> int:
        node = self._nodes.pop(block_id)
        group = node.block_ids.index(block_id)
        node.block_ids[group] = GONE
        slot = node.state if group == 0 else NO_STATE
        if slot != NO_STATE:
            self.forget_state(slot)
        self._drop_empty(node)
        return slot

    def count_hit(self, block_id: int) -> None:
        self._nodes[block_id].num_hits += 1

    def largest_parts(self, most: int) -> list[PrefixPart]:
        return largest_parts(self.roots, most)

    @property
    def roots(self) -> Iterable[TrieNode]:
        return self._roots.values()

    def keep_state(self, block_id: int, slot: int) -> bool:
        node = self._nodes[block_id]
        if node.state != NO_STATE:
            return False
        assert slot not in self._states, "a slot can hold one state only"
        node.state = slot
        self._states[slot] = node
        return True

    def state_of(self, block_id: int) -> int:
        return self._nodes[block_id].state

    def has_state(self, slot: int) -> bool:
        return slot in self._states

    def forget_state(self, slot: int) -> None:
        self._states.pop(slot).state = NO_STATE

    def _drop_empty(self, node: _Node) -> None:
        """Forget a node, and those before it, where no block is left there or further on."""
        while node.parent is not None:
            if node.children or any(block_id != GONE for block_id in node.block_ids):
                return
            del node.parent.children[node.tokens]
            node.parent.num_hits += node.num_hits  # a request that found this found that, too
            self._remember(node)
            node = node.parent
        if not node.children:
            # The root of a salt without blocks is not kept.
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}

    def _remember(self, node: _Node) -> None:
        """Remember that there was such a node."""
        self._evicted[node.number] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)
        assert node.parent is not None
        if node.parent.parent is None:
            self._num_begun[node.tokens] -= 1
            if not self._num_begun[node.tokens]:
                del self._num_begun[node.tokens]

    def content(self, block_id: int) -> list[int]:
        """Return all tokens from the start of the prompt to the end of the block. For audits."""
        tokens: list[int] = []
        node: _Node | None = self._nodes[block_id]
        while node is not None:
            tokens[:0] = node.tokens
            node = node.parent
        return tokens
