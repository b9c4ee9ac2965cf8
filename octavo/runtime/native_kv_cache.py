"""The paged KV cache of the native kernels."""

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
from octavo.models.kv_groups import one_table
from octavo.runtime.capacity import RankLimits
from octavo.runtime.lazy_zeros import lazy_zeros
from octavo.runtime.state_memory import StateMemory

if TYPE_CHECKING:
    from octavo.models.config import KVSpec
    from octavo.runtime.host_rows import HostMemory


class NativeBlocks:
    """Blocks of memory, each with the KV of its tokens in all layers: [blocks, layers, bytes].

    The layers of a block are adjacent, so that the first token takes one huge page of the system,
    not one for each layer. A block holds the layers of one group (``models/kv_groups.py``) at a
    time, which may be any group.

    Args:
        own: the layers that this rank has, of ``num_layers``.
        layer_bytes: the size of a block in one layer.
        limits: the host blocks have the ids after those of the pool, and no kernel reads them.
        states: memory for the recurrent layers, if there are any.
    """

    def __init__(
        self,
        num_layers: int,
        own: range,
        block_size: int,
        layer_bytes: int,
        limits: RankLimits,
        states: StateMemory | None,
    ):
        assert block_size % KV_CHUNK == 0, block_size
        self.num_blocks = limits.num_blocks
        self.block_size = block_size
        self.num_layers = len(own)
        self.states = states
        self._groups = limits.kv_groups or one_table(num_layers)
        if len(own) < num_layers:
            self._groups = self._groups.of_layers(own)
        self.block_bytes = self._groups.layers_per_block * layer_bytes
        data = lazy_zeros(self.num_blocks * self.block_bytes)
        self._data = data.reshape(-1, self._groups.layers_per_block, layer_bytes)
        self._blocks = data.reshape(-1, self.block_bytes)
        num_host_bytes = limits.num_host_blocks * self.block_bytes
        self._host = lazy_zeros(num_host_bytes).reshape(-1, self.block_bytes)
        self._shared_host: HostMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def memory_range(self) -> tuple[int, int]:
        """Address and size of the pool."""
        return self._data.ctypes.data, self._data.nbytes

    @property
    def host_blocks(self) -> np.ndarray:
        """See :meth:`octavo.runtime.forward.KVBlocks.host_blocks`."""
        return self._host

    def share_host(self, memory: HostMemory) -> None:
        """Have the host blocks in memory of all ranks, from now on; to be called before any is
        written."""
        self._host, self._shared_host = memory.own, memory

    @property
    def bytes_per_token(self) -> float:
        """KV size of a token in all layers."""
        slot = self.block_bytes / self.block_size
        return slot / self._groups.layers_per_block * self.num_layers

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks by pairs of source and destination, in all layers.

        The order matters: a block may be the destination of one copy and the source of the next.
        """
        for source, target in copies:
            self._block(target)[:] = self._block(source)
        if self._shared_host is not None:
            self._shared_host.note_copies()

    def _block(self, number: int) -> np.ndarray:
        num_blocks = self.num_blocks
        return self._blocks[number] if number < num_blocks else self._host[number - num_blocks]

    def wait(self) -> None:
        """See :meth:`octavo.runtime.forward.KVBlocks.wait`."""

    def _layout(
        self, kv_format: int, num_kv_heads: int, head_dim: int, head_bytes: int = 0
    ) -> KVLayout:
        return KVLayout(
            kv_format,
            num_kv_heads,
            head_dim,
            self.num_blocks,
            self.block_bytes,
            [self._data[0, place].ctypes.data for _, place in self._groups.places],
            [group for group, _ in self._groups.places],
            head_bytes,
            None if self.states is None else self.states.layout(),
        )


class NativeKVCache(NativeBlocks):
    """Keys and values of all layers, in the byte order of the kernels.

    In each layer a block holds, for each KV head, its tokens in chunks of 16, keys and values
    together; csrc/attention.h defines the order inside a chunk.
    """

    def __init__(
        self,
        library: Library,
        layers: Sequence[KVSpec],
        block_size: int,
        kv_format: int,
        limits: RankLimits,
        states: StateMemory | None,
        own: range,
    ):
        num_kv_heads, head_dim = layers[0].num_kv_heads, padded_head(layers[0].key_dim)
        chunk_bytes = library.check(library.lib.oct_kv_chunk_bytes(kv_format, head_dim))
        layer_bytes = num_kv_heads * (block_size // KV_CHUNK) * chunk_bytes
        super().__init__(len(layers), own, block_size, layer_bytes, limits, states)
        self._library = library
        self._memory = abi.KvMemory(
            kv_format=kv_format,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=self._groups.layers_per_block,
            num_blocks=self.num_blocks,
            block_size=block_size,
            layer_bytes=layer_bytes,
            block_bytes=self.block_bytes,
            kv=self._data.ctypes.data,
        )

    def layout(self) -> KVLayout:
        """Return the addresses of each layer's KV for the kernels, valid as long as the cache."""
        memory = self._memory
        return self._layout(
            memory.kv_format,
            memory.num_kv_heads,
            memory.head_dim,
            memory.layer_bytes // memory.num_kv_heads,
        )

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """See :meth:`octavo.runtime.forward.KVBlocks.move`."""
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
    """The KV cache of latent attention (MLA): in each layer a block holds a row for each of its
    tokens; csrc/latent_formats.h defines the row.
    """

    def __init__(
        self,
        library: Library,
        layers: Sequence[KVSpec],
        block_size: int,
        kv_format: int,
        limits: RankLimits,
        states: StateMemory | None,
        own: range,
    ):
        # The sizes of a token's latent vector and of its rotated key.
        rank, rope_dim = layers[0].key_dim, layers[0].value_dim
        row_bytes = library.check(library.lib.oct_latent_row_bytes(kv_format, rank, rope_dim))
        layer_bytes = block_size * row_bytes
        super().__init__(len(layers), own, block_size, layer_bytes, limits, states)
        self._kv_format, self._width = kv_format, rank + rope_dim
        self._rows = self._data.reshape(*self._data.shape[:2], block_size, row_bytes)

    def layout(self) -> KVLayout:
        """See :meth:`NativeKVCache.layout`: there is one head, whose keys are the rows."""
        return self._layout(self._kv_format, 1, self._width)

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """See :meth:`octavo.runtime.forward.KVBlocks.move`."""
        for to, source in enumerate(sources, target):
            self._row(block_ids, to)[:] = self._row(block_ids, source)

    def _row(self, block_ids: Sequence[int], slot: int) -> np.ndarray:
        """Return the row of a slot in all layers, [layers, row_bytes]."""
        block, place = divmod(slot, self.block_size)
        return self._rows[block_ids[block], :, place]


NativeCache = NativeKVCache | NativeLatentCache


def create_native_cache(
    library: Library,
    layers: Sequence[KVSpec],
    block_size: int,
    kv_format: int,
    limits: RankLimits,
    states: StateMemory | None = None,
    own: range | None = None,
) -> NativeCache:
    """Create the cache of layers whose KV has the same shape; it keeps ``states`` too.

    ``kv_format``: OCT_KV_*. ``own``: those of the layers that this rank has; None: all.
    """
    cache = NativeLatentCache if layers[0].kind == "latent" else NativeKVCache
    own = range(len(layers)) if own is None else own
    return cache(library, layers, block_size, kv_format, limits, states, own)
