"""What makes keys and values of latent vectors, as the native kernels read it.

A model has one matrix for both, ``kv_b`` [H * (P + V), C]. Queries are multiplied with the keys'
part of a head, and what was attended with the values' part: small products, each of a head of its
own. So there is a copy of both, input by input (``oct_latent_args``), of 2 bytes a number, or 4
where the weight has as many. DeepSeek-V2-Lite has 4 MiB of it a layer, V3 has 32.

Weights of bfloat16 stay such, and are multiplied as those of any matrix are. All others become
float16, whose rounding is a small part of that which made them codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import TILE, latent_weight_format
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.fused_ops import FusedLatentAttention, WeightRef


class HeadMatrices(NamedTuple):
    """Of all heads: for keys from P numbers to C, for values from C to V, each as ``as_read``."""

    format: int  # OCT_F32, OCT_F16 or OCT_BF16
    keys: np.ndarray
    values: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class LatentWeights:
    """Those of the layers of a model, each made when it is first asked for: programs that share
    the packed weights share these."""

    def __init__(self, packed: Callable[[WeightRef], abi.Weight], library: Library, pool: Pool):
        self._packed, self._library, self._pool = packed, library, pool
        self._made: dict[int, HeadMatrices] = {}  # by the layer

    def of(self, op: FusedLatentAttention) -> HeadMatrices:
        """Of a ``kv_b`` in any packed format."""
        if op.layer not in self._made:
            self._made[op.layer] = self._make(op)
        return self._made[op.layer]

    def _make(self, op: FusedLatentAttention) -> HeadMatrices:
        packed, library = self._packed(op.kv_b), self._library
        floats = np.empty((packed.n, packed.k), dtype=np.float32)
        library.check(library.lib.oct_unpack(self._pool, ctypes.byref(packed), floats.ctypes.data))
        num_heads, query_dim = op.q.shape
        nope_dim = query_dim - op.rope.rotary_dim
        heads, format = floats.reshape(num_heads, -1, packed.k), latent_weight_format(packed.format)
        return HeadMatrices(
            format,
            as_read(heads[:, :nope_dim], format),
            as_read(heads[:, nope_dim:].transpose(0, 2, 1), format),
        )


def planned_bytes(op: FusedLatentAttention, packed_format: int) -> int:
    """Of the ``HeadMatrices`` of a layer, before there are any."""
    format, rank = latent_weight_format(packed_format), op.norm.weight.shape[0]
    num_heads, query_dim = op.q.shape
    nope_dim, value_dim = query_dim - op.rope.rotary_dim, op.out.width // num_heads
    depth = 2 if format == abi.OCT_BF16 else 1
    numbers = sum(
        -(-inputs // depth) * depth * -(-outputs // TILE) * TILE
        for inputs, outputs in ((nope_dim, rank), (rank, value_dim))
    )
    return num_heads * numbers * (4 if format == abi.OCT_F32 else 2)


def as_read(matrices: np.ndarray, format: int) -> np.ndarray:
    """Matrices float32 [H, inputs, outputs] as kernels read them, filled up with zeros: to a
    multiple of 16 outputs, and in OCT_BF16, which must not be a rounding, to pairs of inputs."""
    is_paired = format == abi.OCT_BF16
    heads, inputs, outputs = matrices.shape
    missing = -inputs % 2 if is_paired else 0, -outputs % TILE
    filled = np.pad(matrices, ((0, 0), (0, missing[0]), (0, missing[1])))
    if not is_paired:
        return np.ascontiguousarray(filled, np.float32 if format == abi.OCT_F32 else np.float16)
    bits = np.ascontiguousarray(filled, np.float32).view(np.uint32) >> 16
    pairs = bits.astype(np.uint16).reshape(heads, -1, 2, filled.shape[2])
    return np.ascontiguousarray(pairs.swapaxes(2, 3))
