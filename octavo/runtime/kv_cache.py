"""The tensors behind the block ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from octavo.kernels.cpu.layout import KV_CHUNK

TORCH_DTYPES = {
    "f32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "float16": torch.float16,
}

_LINE_BYTES = 64


class KVCache:
    """Keys and values of all layers: for each, [num_blocks, block_size, num_kv_heads, head_dim].

    A slot is one token position, ``block_id * block_size + offset``.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._keys = _zeros(shape, dtype, device)
        self._values = _zeros(shape, dtype, device)

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, as views."""
        return self._keys[index], self._values[index]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all layers, one after the other.

        The order counts: a block may be the destination of one copy and the source of the next.
        """
        for source, target in copies:
            self._keys[:, target] = self._keys[:, source]
            self._values[:, target] = self._values[:, source]


class NativeKVCache:
    """The same for the native kernels, in their own order of bytes: [layers, blocks, bytes].

    A block holds, for each KV head, its tokens in chunks of 16 (``chunk_bytes`` each), keys and
    values together; ``oct_attention_args`` has the order inside.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, chunk_bytes: int
    ):
        assert block_size % KV_CHUNK == 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        block_bytes = num_kv_heads * (block_size // KV_CHUNK) * chunk_bytes
        self._data = _zeros((num_layers, num_blocks, block_bytes), torch.uint8, torch.device("cpu"))

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def layer_addresses(self) -> list[int]:
        """Where the blocks of each layer begin; valid as long as the cache."""
        return [layer.data_ptr() for layer in self._data]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """As :meth:`KVCache.copy_blocks`."""
        for source, target in copies:
            self._data[:, target] = self._data[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost memory only where they are written.

    torch fills the memory it allocates; numpy asks the system for pages that are zero already and
    that exist from their first use. A large pool then starts at once and counts as it fills. On the
    CPU they begin at a cache line.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -data.ctypes.data % _LINE_BYTES
    return torch.from_numpy(data[start : start + num_bytes]).view(dtype).view(shape)
