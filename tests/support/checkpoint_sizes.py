"""Sizes of checkpoints, from their tables."""

from __future__ import annotations

from pathlib import Path

from octavo.models.checkpoint import open_checkpoint


def checkpoint_bytes(path: str | Path) -> int:
    """Bytes of all tensors of a checkpoint; no weight is read."""
    return sum(entry.num_bytes for entry in open_checkpoint(path).tensors.values())
