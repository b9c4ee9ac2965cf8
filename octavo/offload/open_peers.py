"""Opens what replicas pass KV on to each other through, in the process of one of them.

A `Transfer` is memory that all of them map (`TransferFiles`), or links between machines
(`transfer_links.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.links.facts import Facts
from octavo.offload.peer_storage import PeerStorage
from octavo.offload.shared_blocks import SharedBlocks, SharedBlocksReader


class KVContent(Protocol):
    """Says what the content of KV blocks depends on beside salt and tokens."""

    def identity(self) -> bytes:
        """Return a hash of it, which is of one machine: of its files, as they are now."""
        ...

    def facts(self) -> Facts:
        """Return it in words, which are the same on all machines that have the same model."""
        ...


class Transfer(Protocol):
    """The way between replicas, as one of them has it."""

    def open(self, rows: Sequence[memoryview], content: KVContent) -> PeerStorage:
        """Return the storage of the blocks of others.

        Args:
            rows: the places of the host KV cache.

        Raises:
            ConfigError: there is no room for a block, or no way.
        """
        ...


@dataclass(frozen=True, slots=True)
class TransferFiles:
    """The regions of ``shared_blocks.py`` that a replica has: their descriptors, inherited from the
    server.

    ``own``: that it writes; None for a replica that computes no prompts for others. ``peers``:
    those of others, by the number of the replica.
    """

    own: int | None = None
    peers: Mapping[int, int] = field(default_factory=dict)

    @property
    def descriptors(self) -> list[int]:
        return [*([] if self.own is None else [self.own]), *self.peers.values()]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def open(self, rows: Sequence[memoryview], content: KVContent) -> PeerStorage:
        """See `Transfer.open`. The files are closed."""
        size = len(rows[0])
        identity = content.identity()
        with room_for_blocks():
            try:
                own = None if self.own is None else SharedBlocks(self.own, size, identity)
                peers = {
                    number: SharedBlocksReader(descriptor, size, identity)
                    for number, descriptor in self.peers.items()
                }
            finally:
                self.close()  # the mappings stay
        return PeerStorage(rows, identity, own, peers)


@contextmanager
def room_for_blocks() -> Iterator[None]:
    """Have a region without room for a block be a ConfigError that names the setting."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"kv_buffer_size: {error}: raise it") from None
