"""The paged KV cache as tensors, for PyTorch ops and the kernels of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.layout import NIBBLE_TYPES
from octavo.kernels.kv_stores import Codec, KVStore, codecs_of, padded_codec
from octavo.models.kv_groups import KVGroups, one_table
from octavo.runtime.capacity import RankLimits
from octavo.runtime.lazy_zeros import lazy_zeros

if TYPE_CHECKING:
    from octavo.models.config import KVSpec

# Copies units of memories [layers, units, ...], by pairs of a source and a target.
CopyUnits: TypeAlias = Callable[[Sequence[Tensor], Sequence[tuple[int, int]]], None]


def copy_units(memories: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pair by pair: a target may be the source of a later pair."""
    for source, target in pairs:
        for memory in memories:
            memory[:, target] = memory[:, source]


class KVCache:
    """Keys and values of all layers, encoded by a codec each.

    A slot is one token position, ``block_id * block_size + offset``, in the layers of one group.

    Args:
        groups: the layer groups with block tables of their own; None: all layers share one.
        copy_units: copies blocks and slots on the device.
        num_host_blocks: blocks in host memory, whose ids follow those of the pool.
        value_dim: the size of a value vector, if it differs from ``head_dim``.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        codecs: tuple[Codec, Codec],
        device: torch.device,
        groups: KVGroups | None = None,
        copy_units: CopyUnits = copy_units,
        num_host_blocks: int = 0,
        value_dim: int | None = None,
    ):
        self.num_layers = num_layers
        self._groups = groups or one_table(num_layers)
        self._copy_units = copy_units
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (self._groups.layers_per_block, num_blocks, block_size, num_kv_heads)
        self._stores = [
            (codec, [_zeros((*shape, part.width), part.dtype, device) for part in parts])
            for codec, dim in zip(codecs, (head_dim, value_dim or head_dim), strict=True)
            for parts in [codec.parts(dim)]
        ]
        self._host_rows = _HostRows(self._parts, num_host_blocks)

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._parts)

    @property
    def bytes_per_token(self) -> float:
        """KV size of a token in all layers."""
        slot = self.num_bytes / (self.num_blocks * self.block_size)
        return slot / self._groups.layers_per_block * self.num_layers

    def layer(self, index: int) -> tuple[KVStore, KVStore]:
        """Return views of the keys and the values of a layer."""
        _, place = self._groups.places[index]
        keys, values = (
            KVStore(codec, [memory[place] for memory in parts]) for codec, parts in self._stores
        )
        return keys, values

    @property
    def num_groups(self) -> int:
        return self._groups.num_groups

    def group_of(self, index: int) -> int:
        """Return the group of a layer."""
        group, _ = self._groups.places[index]
        return group

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """See :meth:`NativeKVCache.copy_blocks`."""
        end = self.num_blocks
        for leaves_pool, pairs in groupby(copies, lambda copy: max(copy) >= end):
            if not leaves_pool:
                self._copy_units(self._parts, list(pairs))
                continue
            for source, target in pairs:
                if target >= end:
                    self._host_rows.put(target - end, source)
                else:
                    self._host_rows.get(source - end, target)

    @property
    def host_blocks(self) -> np.ndarray:
        """See :meth:`octavo.runtime.forward.KVBlocks.host_blocks`."""
        return self._host_rows.rows.numpy()

    def wait(self) -> None:
        """See :meth:`octavo.runtime.forward.KVBlocks.wait`."""

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """See :meth:`octavo.runtime.forward.KVBlocks.move`."""

        def slot(place: int) -> int:
            return block_ids[place // self.block_size] * self.block_size + place % self.block_size

        pairs = [(slot(source), slot(to)) for to, source in enumerate(sources, target)]
        self._copy_units([part.flatten(1, 2) for part in self._parts], pairs)

    @property
    def _parts(self) -> list[Tensor]:
        return [memory for _, parts in self._stores for memory in parts]


class _HostRows:
    """Blocks in host memory, pinned for copies from and to a GPU. A row of bytes is a block: its
    content in each of ``parts``, one after the other."""

    def __init__(self, parts: Sequence[Tensor], num_blocks: int):
        self._parts = parts
        self._sizes = [part[:, :1].nbytes for part in parts]
        shape = num_blocks, sum(self._sizes)
        if parts[0].is_cuda:
            self.rows = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        else:
            self.rows = _zeros(shape, torch.uint8, torch.device("cpu"))

    def put(self, row: int, block_id: int) -> None:
        for part, piece in zip(self._parts, self._pieces(row), strict=True):
            content = part[:, block_id].contiguous().flatten().view(torch.uint8)
            piece.copy_(content, non_blocking=True)

    def get(self, row: int, block_id: int) -> None:
        for part, piece in zip(self._parts, self._pieces(row), strict=True):
            memory = part[:, block_id]
            # A copy is aligned for values of any type.
            content = piece.to(part.device, non_blocking=True, copy=True)
            memory.copy_(content.view(part.dtype).view(memory.shape))

    def _pieces(self, row: int) -> tuple[Tensor, ...]:
        return self.rows[row].split(self._sizes)


def create_kv_cache(
    layers: Sequence[KVSpec],
    dtype: str,
    block_size: int,
    limits: RankLimits,
    device: torch.device,
    copy_units: CopyUnits = copy_units,
) -> KVCache:
    """Create the cache of layers that all have KV of the same shape, in the type called ``dtype``.

    On the CPU heads are padded as by the native kernels, so that equal values get equal codes; the
    kernels of a GPU need no padding but for 4-bit types.
    """
    kept = layers[0]
    keys, values = codecs_of(dtype, kept.kind == "latent")
    if kept.kind != "latent" and (device.type == "cpu" or dtype in NIBBLE_TYPES):
        keys, values = padded_codec(keys, kept.key_dim), padded_codec(values, kept.value_dim)
    return KVCache(
        len(layers),
        limits.num_blocks,
        block_size,
        kept.num_kv_heads,
        kept.key_dim,
        (keys, values),
        device,
        limits.kv_groups,
        copy_units=copy_units,
        num_host_blocks=limits.num_host_blocks,
        value_dim=kept.value_dim,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = lazy_zeros(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(data).view(dtype).view(shape)
