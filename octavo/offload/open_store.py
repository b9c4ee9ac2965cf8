"""From settings to a store behind an engine's block pool."""

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
    """A shelf over ``rows`` of host memory, with a folder behind it if there is to be one.

    None if another engine has the folder, and nothing else was asked for: this one goes on without,
    and says so. ConfigError if the folder cannot be used.

    Args:
        num_blocks: of the pool, after which the shelf's come. windows: of its groups of layers.
        identity, rule: asked for where there is a folder.
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
