"""Opens the store behind an engine's block pool that its settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from octavo.core.host_kv_cache import HostKVCache, RestoreRule
from octavo.core.kv_tables import Windows
from octavo.offload.block_folder import BlockFolder, FolderBusyError
from octavo.offload.disk_storage import DiskStorage
from octavo.settings.kv_offload import OffloadConfig

_log = logging.getLogger("octavo")


def open_store(
    config: OffloadConfig,
    rows: Sequence[memoryview],
    num_blocks: int,
    block_size: int,
    windows: Windows,
    identity: Callable[[], bytes],
    rule: Callable[[], RestoreRule],
) -> HostKVCache | None:
    """Return a host KV cache over ``rows`` of host memory, with a folder behind it if one is set.

    None if another engine has the folder, and nothing else was asked for: this engine goes on
    without a store, and logs that.

    Args:
        num_blocks: of the pool, whose ids come before those of host blocks.
        windows: the pool's groups of layers.
        identity, rule: called only if there is a folder.

    Raises:
        ConfigError: the folder cannot be used.
    """
    sizes = num_blocks, len(rows), block_size, len(rows[0])
    if config.folder is None:
        return HostKVCache(*sizes, windows=windows)
    try:
        folder = BlockFolder(config.folder, config.max_bytes)
    except FolderBusyError as busy:
        _log.warning("%s; this engine goes on without it", busy)
        return HostKVCache(*sizes, windows=windows) if config.keeps_memory else None
    return HostKVCache(*sizes, DiskStorage(folder, rows, identity()), rule(), windows)
