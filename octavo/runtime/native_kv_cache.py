"""The memory behind the block ids, for the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import KV_CHUNK
from octavo.kernels.cpu.library import Library
from octavo.kernels.cpu.program import KVLayout
from octavo.models.kv_groups import KVGroups, one_table
from octavo.runtime.state_memory import StateMemory
from octavo.runtime.untouched import untouched_zeros


class NativeKVCache:
    """Keys and values of all layers in the kernels' own order of bytes: [blocks, layers, bytes].

    Of each layer a block holds, for each KV head, its tokens in chunks of 16, keys and values
    together; csrc/attention.h has the order inside. What a block has of all layers lies together,
    so that the first token asks the system for one huge page, and not for one of each layer. A
    block is of the layers of one group (``models/kv_groups.py``), whichever it is at the time.

    Args:
        kv_format: OCT_KV_*.
        groups: of the layers; None: all have one table.
        states: of recurrent layers, if there are any.
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
        states: StateMemory | None = None,
    ):
        assert block_size % KV_CHUNK == 0, block_size
        self.states = states
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self._groups = groups or one_table(num_layers)
        self._library = library
        num_layers = self._groups.layers_per_block
        chunk_bytes = library.check(library.lib.oct_kv_chunk_bytes(kv_format, head_dim))
        layer_bytes = num_kv_heads * (block_size // KV_CHUNK) * chunk_bytes
        self.block_bytes = num_layers * layer_bytes
        data = untouched_zeros(num_blocks * self.block_bytes)
        self._data = data.reshape(num_blocks, num_layers, layer_bytes)
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
        return self._data.nbytes

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
            None if self.states is None else self.states.layout(),
        )

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all layers, one after the other.

        The order counts: a block may be the destination of one copy and the source of the next.
        """
        for source, target in copies:
            self._data[target] = self._data[source]

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
