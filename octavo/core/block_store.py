"""The interface of a store of KV blocks that were evicted from the pool, and the keys of blocks.

A store has blocks of its own in host memory, whose ids follow those of the pool. No step computes
in them: they are only copied to and from, and such a copy stands in ``Batch.block_copies`` like any
other, in its order. A block that lies further away (on a disk, or at another replica) is first read
to host memory, while the request that needs it waits and others go on::

    pool ids      0 ... num_blocks - 1      what steps read and write
    host ids      num_blocks ...            what copies reach
    KV storage    by key                    read to host memory, and written from it

The key of a block is a hash of the salt, of all tokens up to the block's end, and of the group of
layers that it serves.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octavo.core.request import Request


class BlockPart(NamedTuple):
    """The blocks' share of one group of layers: the group, the number of the block in the sequence,
    and its key."""

    group: int
    number: int
    key: bytes


class Stored(NamedTuple):
    """Blocks that a store can add to those that the pool has of a request.

    ``num_tokens`` more tokens are known if ``parts`` are copied to the pool. ``is_awaited``: some
    blocks are being read, so that the request should wait.
    """

    num_tokens: int = 0
    parts: Sequence[BlockPart] = ()
    is_awaited: bool = False


NOTHING_STORED = Stored()


@dataclass(slots=True)
class StoreStats:
    """Totals of a store. Blocks have the pool's size, ``block_bytes`` each."""

    block_bytes: int = 0
    num_stored: int = 0  # copied to host memory
    num_written: int = 0  # and from there to the KV storage
    num_restored: int = 0
    num_dropped: int = 0  # for want of room or time
    num_errors: int = 0  # blocks that could not be written, or read back unchanged
    tokens_from_memory: int = 0
    tokens_from_storage: int = 0

    @property
    def figures(self) -> Mapping[str, Any]:
        """The store's fields of ``StepStats``, by name."""
        return {
            "kv_blocks_stored": self.num_stored,
            "kv_blocks_written": self.num_written,
            "kv_blocks_restored": self.num_restored,
            "kv_blocks_dropped": self.num_dropped,
            "kv_store_errors": self.num_errors,
            "kv_bytes_stored": self.num_stored * self.block_bytes,
            "kv_bytes_restored": self.num_restored * self.block_bytes,
            "prefix_tokens_from_memory": self.tokens_from_memory,
        }


class BlockStore(Protocol):
    """A store of evicted blocks, as the block manager calls it; by default one that keeps nothing.

    Single-threaded, like the manager.
    """

    @property
    def figures(self) -> Mapping[str, Any]:
        """The store's fields of ``StepStats``, by name."""
        return {}

    @property
    def saves_ahead(self) -> bool:
        """True if the store outlives the pool, so that blocks which the pool still has are worth
        saving."""
        return False

    @property
    def has_room(self) -> bool:
        """True if a block that is offered now will be kept, as far as that can be known."""
        return False

    def offer(
        self,
        block_id: int,
        key_of: Callable[[int], bytes],
        key_before: Callable[[int], bytes | None] = lambda _: None,
    ) -> int | None:
        """Return the store's block to which one of the pool's should be copied before it is
        overwritten.

        None if the store has no room, or has the content already. ``key_of`` and ``key_before`` are
        those of ``PrefixCache``.
        """
        return None

    def ask(
        self, request: Request, path: Sequence[Sequence[int]], num_known: int, limit: int
    ) -> Stored:
        """Return the blocks that the store has of a request within its first ``limit`` tokens.

        ``path`` are the pool's blocks (see ``PrefixCache.path``), of which the first ``num_known``
        can be used without a store. Blocks on a disk begin to be read, if that is worth while. The
        answer holds until the next call.
        """
        return NOTHING_STORED

    def take(self, stored: Stored) -> Sequence[int]:
        """Return the blocks to copy the parts from; they keep their content until the copies are
        settled."""
        return ()

    def settle(self, copies: Iterable[tuple[int, int]], *, are_done: bool) -> None:
        """Note the end of a step with these copies. ``are_done=False``: they may or may not have
        been made."""
        return None

    def wait(self, seconds: float) -> bool:
        """Wait until a read or a write has ended; False if none is under way."""
        return False

    def violations(self) -> Sequence[str]:
        """Return every inconsistency, normally none. Takes time in proportion to the store's
        blocks."""
        return ()

    def close(self) -> None:
        return None


class NoBlockStore(BlockStore):
    """A store that keeps nothing: evicted blocks are lost."""


def root_key(salt: str) -> bytes:
    """Return the key that stands before a first block. Without the salt no key of a tenant can be
    made."""
    return hashlib.sha256(b"octavo kv\0" + salt.encode()).digest()


def next_key(key: bytes, token_ids: Iterable[int]) -> bytes:
    """Return the key of the block that follows the one of ``key``: SHA-256, so that keys do not
    collide."""
    return hashlib.sha256(key + array("q", token_ids).tobytes()).digest()


def part_key(key: bytes, group: int) -> bytes:
    """Return the key of one group's part of a block."""
    return key if group == 0 else key + group.to_bytes()


def following_keys(key: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of these tokens, which follow the block of ``key``."""
    content, size = array("q", token_ids).tobytes(), 8 * block_size
    keys = []
    for end in range(size, len(content) + 1, size):
        key = hashlib.sha256(key + content[end - size : end]).digest()
        keys.append(key)
    return keys


def keys_of(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """Return the keys of a request's first full blocks. The request keeps them, as its tokens do
    not change."""
    keys = request.block_keys
    if len(keys) < num_blocks:
        key = keys[-1] if keys else root_key(request.cache_salt)
        tokens = request.token_ids[len(keys) * block_size : num_blocks * block_size]
        keys += following_keys(key, tokens, block_size)
    return keys[:num_blocks]
