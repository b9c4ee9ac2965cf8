"""Where the KV of blocks goes for which the pool has no room, and whence it comes back.

A store lends blocks of its own, the *shelf*, whose ids follow those of the pool. No step computes
in them: they are only copied to and from, and such a copy stands in ``Batch.block_copies`` like any
other, in its order. What is not on the shelf, but further away (on a disk), is first read to the
shelf, while the request that needs it waits and others go on::

    pool ids      0 ... num_blocks - 1      what steps read and write
    shelf ids     num_blocks ...            what copies reach
    depot         by key                    what is read to the shelf, and written from it

What a block holds is known by a key: of the salt, of all tokens up to the block's end, and of the
group of layers that it serves.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from octavo.core.request import Request


class BlockPart(NamedTuple):
    """What one group of layers has of a block of a sequence, by its number in turn."""

    group: int
    number: int
    key: bytes


class Stored(NamedTuple):
    """What a store adds to the blocks that the pool has of a request: so many tokens more, if these
    parts are brought to the pool. ``is_awaited``: it is better off when it waits, because some are
    on their way."""

    num_tokens: int = 0
    parts: Sequence[BlockPart] = ()
    is_awaited: bool = False


NOTHING_STORED = Stored()


@dataclass(slots=True)
class StoreStats:
    """Totals of a store. Blocks are of the pool's size, ``block_bytes`` each."""

    block_bytes: int = 0
    num_stored: int = 0  # copied to the shelf
    num_written: int = 0  # and from there to the depot
    num_restored: int = 0
    num_dropped: int = 0  # there was no room, or no time
    num_errors: int = 0  # what could not be written, or not be read as it was written
    tokens_from_memory: int = 0
    tokens_from_disk: int = 0

    @property
    def figures(self) -> Mapping[str, Any]:
        """The fields of ``StepStats`` that are a store's, by name."""
        return {
            "kv_blocks_stored": self.num_stored,
            "kv_blocks_written": self.num_written,
            "kv_blocks_restored": self.num_restored,
            "kv_blocks_dropped": self.num_dropped,
            "kv_store_errors": self.num_errors,
            "kv_bytes_stored": self.num_stored * self.block_bytes,
            "kv_bytes_restored": self.num_restored * self.block_bytes,
            "prefix_tokens_from_memory": self.tokens_from_memory,
            "prefix_tokens_from_disk": self.tokens_from_disk,
        }


class BlockStore(Protocol):
    """What the block manager asks. Single-threaded, as it is."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """The fields of ``StepStats`` that are a store's, by name."""
        ...

    @property
    def saves_ahead(self) -> bool:
        """Whether it outlives the pool, so that it is worth to have what the pool still has."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a block that is offered now will be kept, as far as that can be known."""
        ...

    def offer(
        self,
        block_id: int,
        key_of: Callable[[int], bytes],
        key_before: Callable[[int], bytes | None] = lambda _: None,
    ) -> int | None:
        """The block to copy one of the pool's to, which is about to be written over. None: nowhere,
        or it is there. ``key_of`` and ``key_before`` are as of ``PrefixCache``."""
        ...

    def ask(
        self, request: Request, path: Sequence[Sequence[int]], num_known: int, limit: int
    ) -> Stored:
        """What it has of a request's blocks within the first ``limit`` tokens, where the pool has
        those of ``path`` (as of ``PrefixCache.path``), and alone serves ``num_known`` blocks.

        What is further away it begins to read, if that is worth while. The answer is good until
        the next call.
        """
        ...

    def take(self, stored: Stored) -> Sequence[int]:
        """The blocks to copy the parts from, which keep their content until that is settled."""
        ...

    def settle(self, copies: Iterable[tuple[int, int]], *, are_done: bool) -> None:
        """A step with these copies is over. Not done: whether they were made is not known."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until something that it reads or writes is over. False: there is no such thing."""
        ...

    def violations(self) -> Sequence[str]:
        """What is inconsistent, which is to be nothing. Costs time in proportion to the shelf."""
        ...

    def close(self) -> None: ...


class NoBlockStore:
    """What is forgotten is gone."""

    figures: Mapping[str, int] = MappingProxyType({})
    saves_ahead = False
    has_room = False

    def offer(
        self,
        block_id: int,
        key_of: Callable[[int], bytes],
        key_before: Callable[[int], bytes | None] = lambda _: None,
    ) -> int | None:
        return None

    def ask(
        self, request: Request, path: Sequence[Sequence[int]], num_known: int, limit: int
    ) -> Stored:
        return NOTHING_STORED

    def take(self, stored: Stored) -> Sequence[int]:
        return ()

    def settle(self, copies: Iterable[tuple[int, int]], *, are_done: bool) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        return False

    def violations(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


def root_key(salt: str) -> bytes:
    """What stands before the first block. Without its salt, no key of a tenant's can be made."""
    return hashlib.sha256(b"octavo kv\0" + salt.encode()).digest()


def next_key(key: bytes, token_ids: Iterable[int]) -> bytes:
    """Of the block that follows the one of ``key``. SHA-256, which nobody can make collide."""
    return hashlib.sha256(key + array("q", token_ids).tobytes()).digest()


def part_key(key: bytes, group: int) -> bytes:
    """Of what one group of layers has of a block."""
    return key if group == 0 else key + group.to_bytes()


def keys_of(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The keys of a request's first full blocks. It keeps them, as its tokens do not change."""
    keys = request.block_keys
    key = keys[-1] if keys else root_key(request.cache_salt)
    for index in range(len(keys), num_blocks):
        key = next_key(key, request.token_ids[index * block_size : (index + 1) * block_size])
        keys.append(key)
    return keys[:num_blocks]
