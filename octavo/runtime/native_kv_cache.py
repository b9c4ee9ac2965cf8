"""The memory behind the block ids, for the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import KV_CHUNK, padded_head
from octavo.kernels.cpu.library import Library
from octavo.kernels.cpu.program import KVLayout
from octavo.models.kv_groups import KVGroups, one_table
from octavo.runtime.lazy_zeros import lazy_zeros
from octavo.runtime.state_memory import StateMemory

if TYPE_CHECKING:
    from octavo.models.config import KVSpec


class NativeBlocks:
    """Blocks of memory, each with what its tokens keep in all layers: [blocks, layers, bytes].

    What a block has of all layers lies together, so that the first token asks the system for one
    huge page, and not for one of each layer. A block is of the layers of one group
    (``models/kv_groups.py``), whichever it is at the time.

    Args:
        layer_bytes: of a block, in one layer.
        groups: of the layers; None: all have one table.
        num_shelf_blocks: after those of the pool; no kernel knows of them.
    """

    states: StateMemory | None = None  # of recurrent layers, if there are any

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        layer_bytes: int,
        groups: KVGroups | None = None,
        num_host_blocks: int = 0,
    ):
        assert block_size % KV_CHUNK == 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self._groups = groups or one_table(num_layers)
        self.block_bytes = self._groups.layers_per_block * layer_bytes
        data = lazy_zeros((num_blocks + num_host_blocks) * self.block_bytes)
        self._data = data.reshape(-1, self._groups.layers_per_block, layer_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def host_blocks(self) -> np.ndarray:
        """As :meth:`octavo.runtime.forward.Blocks.host_blocks`."""
        return self._data[self.num_blocks :].reshape(-1, self.block_bytes)

    @property
    def bytes_per_token(self) -> float:
        """In all layers."""
        slot = self.block_bytes / self.block_size
        return slot / self._groups.layers_per_block * self.num_layers

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all layers, one after the other.

        The order counts: a block may be the destination of one copy and the source of the next.
        """
        for source, target in copies:
            self._data[target] = self._data[source]

    def wait(self) -> None:
        """As :meth:`octavo.runtime.forward.Blocks.wait`."""

    def _layout(self, kv_format: int, num_kv_heads: int, head_dim: int) -> KVLayout:
        return KVLayout(
            kv_format,
            num_kv_heads,
            head_dim,
            self.num_blocks,
            self.block_bytes,
            [self._data[0, place].ctypes.data for _, place in self._groups.places],
            [group for group, _ in self._groups.places],
            None if self.states is None else self.states.layout(),
        )


class NativeKVCache(NativeBlocks):
    """Keys and values of all layers in the kernels' own order of bytes.

    Of each layer a block holds, for each KV head, its tokens in chunks of 16, keys and values
    together; csrc/attention.h has the order inside.

    Args:
        kv_format: OCT_KV_*.
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
        num_host_blocks: int = 0,
        states: StateMemory | None = None,
    ):
        chunk_bytes = library.check(library.lib.oct_kv_chunk_bytes(kv_format, head_dim))
        layer_bytes = num_kv_heads * (block_size // KV_CHUNK) * chunk_bytes
        super().__init__(num_layers, num_blocks, block_size, layer_bytes, groups, num_host_blocks)
        self._library, self.states = library, states
        self._memory = abi.KVMemory(
            kv_format=kv_format,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=self._groups.layers_per_block,
            num_blocks=num_blocks,
            block_size=block_size,
            layer_bytes=layer_bytes,
            block_bytes=self.block_bytes,
            kv=self._data.ctypes.data,
        )

    def layout(self) -> KVLayout:
        """Where kernels find each layer's keys and values; valid as long as the cache."""
        memory = self._memory
        return self._layout(memory.kv_format, memory.num_kv_heads, memory.head_dim)

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


class NativeLatentCache(NativeBlocks):
    """What latent attention keeps: of each layer a block holds a row for each of its tokens, one
    after the other; csrc/latent_formats.h has what is in a row.

    Args:
        rank, rope_dim: numbers of the latent vector of a token, and of its rotated key.
        kv_format: OCT_KV_*.
    """

    def __init__(
        self,
        library: Library,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        rank: int,
        rope_dim: int,
        kv_format: int,
        groups: KVGroups | None = None,
        num_host_blocks: int = 0,
    ):
        row_bytes = library.check(library.lib.oct_latent_row_bytes(kv_format, rank, rope_dim))
        layer_bytes = block_size * row_bytes
        super().__init__(num_layers, num_blocks, block_size, layer_bytes, groups, num_host_blocks)
        self._kv_format, self._width = kv_format, rank + rope_dim
        blocks, layers, _ = self._data.shape
        self._rows = self._data.reshape(blocks, layers, block_size, row_bytes)

    def layout(self) -> KVLayout:
        """As :meth:`NativeKVCache.layout`: one head, whose keys are rows."""
        return self._layout(self._kv_format, 1, self._width)

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """As :meth:`octavo.runtime.forward.Blocks.move`."""
        for to, source in enumerate(sources, target):
            self._row(block_ids, to)[:] = self._row(block_ids, source)

    def _row(self, block_ids: Sequence[int], slot: int) -> np.ndarray:
        """In all layers, [layers, row_bytes]."""
        block, place = divmod(slot, self.block_size)
        return self._rows[block_ids[block], :, place]


NativeCache = NativeKVCache | NativeLatentCache


def create_native_cache(
    library: Library,
    layers: Sequence[KVSpec],
    num_blocks: int,
    block_size: int,
    kv_format: int,
    groups: KVGroups | None = None,
    num_host_blocks: int = 0,
    states: StateMemory | None = None,
) -> NativeCache:
    """The cache of layers that all keep as much of a token, and of the states of others."""
    kept = layers[0]
    blocks = len(layers), num_blocks, block_size
    if kept.kind == "latent":
        rows = kept.key_dim, kept.value_dim
        assert states is None, "no model has latents and states"
        return NativeLatentCache(library, *blocks, *rows, kv_format, groups, num_host_blocks)
    heads = kept.num_kv_heads, padded_head(kept.key_dim)
    return NativeKVCache(library, *blocks, *heads, kv_format, groups, num_host_blocks, states)
