"""The memory behind the block ids, for the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import KV_CHUNK
from octavo.kernels.cpu.library import Library
from octavo.kernels.cpu.program import KVLayout
from octavo.models.kv_groups import KVGroups, one_table

_LINE_BYTES = 64


class NativeKVCache:
    """Keys and values of all layers in the kernels' own order of bytes: [blocks, layers, bytes].

    Of each layer a block holds, for each KV head, its tokens in chunks of 16, keys and values
    together; csrc/attention.h has the order inside. What a block has of all layers lies together,
    so that the first token asks the system for one huge page, and not for one of each layer. A
    block is of the layers of one group (``models/kv_groups.py``), whichever it is at the time.

    Args:
        kv_format: OCT_KV_*.
        groups: of the layers; None: all have one table.
        num_shelf_blocks: after those of the pool; no kernel knows of them.
    """

    def __init__(
        self,
        library: Library,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_format: int,
        groups: KVGroups | None = None,
        num_shelf_blocks: int = 0,
    ):
        assert block_size % KV_CHUNK == 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self._groups = groups or one_table(num_layers)
        self._library = library
        num_layers = self._groups.layers_per_block
        chunk_bytes = library.check(library.lib.oct_kv_chunk_bytes(kv_format, head_dim))
        layer_bytes = num_kv_heads * (block_size // KV_CHUNK) * chunk_bytes
        self.block_bytes = num_layers * layer_bytes
        data = untouched_zeros((num_blocks + num_shelf_blocks) * self.block_bytes)
        self._data = data.reshape(-1, num_layers, layer_bytes)
        self._memory = abi.KVMemory(
            kv_format=kv_format,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            layer_bytes=layer_bytes,
            block_bytes=self.block_bytes,
            kv=data.ctypes.data,
        )

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def shelf(self) -> np.ndarray:
        """As :meth:`octavo.runtime.forward.Blocks.shelf`."""
        return self._data[self.num_blocks :].reshape(-1, self.block_bytes)

    @property
    def bytes_per_token(self) -> float:
        """In all layers."""
        slot = self.block_bytes / self.block_size
        return slot / self._groups.layers_per_block * self.num_layers

    def layout(self) -> KVLayout:
        """Where kernels find each layer's keys and values; valid as long as the cache."""
        memory = self._memory
        return KVLayout(
            memory.kv_format,
            memory.num_kv_heads,
            memory.head_dim,
            self.num_blocks,
            self.block_bytes,
            [self._data[0, place].ctypes.data for _, place in self._groups.places],
            [group for group, _ in self._groups.places],
        )

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all layers, one after the other.

        The order counts: a block may be the destination of one copy and the source of the next.
        """
        for source, target in copies:
            self._data[target] = self._data[source]

    def wait(self) -> None:
        """As :meth:`octavo.runtime.forward.Blocks.wait`."""

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """As :meth:`octavo.runtime.forward.Blocks.move`."""
        table, slots = array("i", block_ids), array("i", sources)
        code = self._library.lib.oct_kv_move(
            ctypes.byref(self._memory),
            table.buffer_info()[0],
            len(table),
            slots.buffer_info()[0],
            len(slots),
            target,
        )
        self._library.check(code)


def untouched_zeros(num_bytes: int) -> np.ndarray:
    """Zeros (uint8, from the beginning of a cache line) that cost memory where they are written.

    numpy asks the system for pages that are zero already and that exist from their first use, where
    torch fills what it allocates. A large pool then starts at once and counts as it fills.
    """
    data = np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -data.ctypes.data % _LINE_BYTES
    return data[start : start + num_bytes]
