"""Settings of KV offload to a folder of limited size, to host memory, and to other replicas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Default of host memory behind which a folder is used: for a prompt of so many tokens, but no more
# bytes than that. All blocks from the disk go through it.
HOST_CACHE_TOKENS = 8192
_HOST_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """A store of blocks, resolved.

    Args:
        num_places: blocks of host memory. block_bytes: of each.
        folder: on a disk, None for none. max_bytes: the most that its files may take.
        keeps_memory: host memory was asked for, and is of use without the folder too.
        is_transferred: replicas pass blocks on to each other, through host memory.
    """

    num_places: int
    block_bytes: int
    folder: Path | None = None
    max_bytes: int = 0
    keeps_memory: bool = False
    is_transferred: bool = False


def default_host_blocks(num_useful: int, block_bytes: int) -> int:
    """Return the default number of host blocks for a folder: those of ``HOST_CACHE_TOKENS``."""
    return max(1, min(num_useful, _HOST_CACHE_BYTES // block_bytes))
