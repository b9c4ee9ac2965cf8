"""The tensors behind the block ids, for ops of PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from octavo.runtime.native_kv_cache import untouched_zeros

TORCH_DTYPES = {
    "f32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "float16": torch.float16,
}


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
        """As :meth:`NativeKVCache.copy_blocks`."""
        for source, target in copies:
            self._keys[:, target] = self._keys[:, source]
            self._values[:, target] = self._values[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = untouched_zeros(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(data).view(dtype).view(shape)
