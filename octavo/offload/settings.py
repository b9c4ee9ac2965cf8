"""What a user says of KV offload: a folder with the most it may take, and host memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.core.kv_tables import Windows, most_blocks

# Where nobody says how much host memory: for a prompt of so many tokens, but no more bytes than
# that. What comes from a disk goes through it.
_SHELF_TOKENS = 8192
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


def shelf_blocks(windows: Windows, block_size: int, block_bytes: int) -> int:
    """Blocks of host memory for a folder, where nobody says how many; of layers in such groups."""
    useful = most_blocks(windows, _SHELF_TOKENS, block_size, step_tokens=0)
    return max(1, min(useful, _SHELF_BYTES // block_bytes))
