"""Opens the memory through which replicas pass KV on to each other, in the process of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.base.errors import ConfigError
from octavo.offload.peer_storage import PeerStorage
from octavo.offload.shared_blocks import SharedBlocks, SharedBlocksReader


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


def open_peers(files: TransferFiles, rows: Sequence[memoryview], identity: bytes) -> PeerStorage:
    """Map the regions, close the files, and return the storage over them.

    Args:
        rows: the places of the host KV cache.
        identity: what KV depends on beside salt and tokens.

    Raises:
        ConfigError: there is no room for a block.
    """
    size = len(rows[0])
    try:
        own = None if files.own is None else SharedBlocks(files.own, size, identity)
        peers = {
            number: SharedBlocksReader(descriptor, size, identity)
            for number, descriptor in files.peers.items()
        }
    except ValueError as error:
        raise ConfigError(f"kv_buffer_size: {error}: raise it") from None
    finally:
        files.close()  # the mappings stay
    return PeerStorage(rows, identity, own, peers)
