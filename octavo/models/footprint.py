"""Bytes that a model needs, before it is loaded: one arithmetic for all who ask."""

from __future__ import annotations

from pathlib import Path

from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig


def checkpoint_bytes(path: str | Path) -> int:
    """Bytes of all tensors of a checkpoint, from its tables: no weight is read."""
    return sum(entry.num_bytes for entry in open_checkpoint(path).tensors.values())


def kv_bytes_per_token_and_layer(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes that one token's keys and values take in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * bytes_per_value


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes that one token's keys and values take in all layers."""
    return config.num_layers * kv_bytes_per_token_and_layer(config, bytes_per_value)


def kv_blocks_that_fit(
    config: ModelConfig, num_bytes: int, block_size: int, bytes_per_value: int
) -> int:
    """Blocks of ``block_size`` tokens that ``num_bytes`` hold."""
    return num_bytes // (block_size * kv_bytes_per_token(config, bytes_per_value))
