"""What a user says of KV offload: a folder with the most it may take, and host memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Where nobody says how much host memory: for a prompt of so many tokens, but no more bytes than
# that. What comes from a disk goes through it.
SHELF_TOKENS = 8192
_SHELF_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """A store of blocks, resolved.

    Args:
        num_places: blocks of host memory. block_bytes: of each.
        folder: on a disk, None for none. max_bytes: that its files may take.
        keeps_memory: host memory was asked for, and is of use without the folder too.
    """

    num_places: int
    block_bytes: int
    folder: Path | None = None
    max_bytes: int = 0
    keeps_memory: bool = False


def shelf_blocks(num_useful: int, block_bytes: int) -> int:
    """Blocks of host memory for a folder, where nobody says how many: those of ``SHELF_TOKENS``."""
    return max(1, min(num_useful, _SHELF_BYTES // block_bytes))
