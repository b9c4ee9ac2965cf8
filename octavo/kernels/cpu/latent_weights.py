"""Matrices that expand latent vectors to keys and values, in the layout of the native kernels.

A model has one matrix for both, ``kv_b`` [H * (P + V), C]. Queries are multiplied with the key part
of a head, and attended latents with the value part: small products, one for each head. So both
parts are copied, input by input (``oct_latent_args``), in 2 bytes a number, or 4 if the weight has
as many. DeepSeek-V2-Lite has 4 MiB of it a layer, V3 has 32.

Weights of bfloat16 keep their type, and are multiplied like those of any matrix. All others become
float16, whose rounding is small beside that of their quantization.
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
from octavo.kernels.parts import Part


class HeadMatrices(NamedTuple):
    """Matrices of all heads: for keys from P to C values, for values from C to V, laid out by
    ``as_read``."""

    format: int  # OCT_F32, OCT_F16 or OCT_BF16
    keys: np.ndarray
    values: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class LatentWeights:
    """The matrices of a model's layers, made on first use and shared by programs that share packed
    weights."""

    def __init__(
        self,
        packed: Callable[[WeightRef], abi.Weight],
        library: Library,
        pool: Pool,
        part: Part,
    ):
        self._packed, self._library, self._pool, self._part = packed, library, pool, part
        self._made: dict[int, HeadMatrices] = {}  # by the layer

    def of(self, op: FusedLatentAttention) -> HeadMatrices:
        """The matrices of the rank's heads of a layer, from a ``kv_b`` in any packed format."""
        if op.layer not in self._made:
            self._made[op.layer] = self._make(op)
        return self._made[op.layer]

    def _make(self, op: FusedLatentAttention) -> HeadMatrices:
        packed, library = self._packed(op.kv_b), self._library
        floats = np.empty((packed.n, packed.k), dtype=np.float32)
        library.check(library.lib.oct_unpack(self._pool, ctypes.byref(packed), floats.ctypes.data))
        num_heads, query_dim = op.q.shape
        nope_dim = query_dim - op.rope.rotary_dim
        mine, format = self._part.of_heads(num_heads), latent_weight_format(packed.format)
        heads = floats.reshape(num_heads, -1, packed.k)[mine.start : mine.stop]
        return HeadMatrices(
            format,
            as_read(heads[:, :nope_dim], format),
            as_read(heads[:, nope_dim:].transpose(0, 2, 1), format),
        )


def planned_bytes(op: FusedLatentAttention, packed_format: int) -> int:
    """Bytes of the ``HeadMatrices`` of a layer, before they exist."""
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
    """Lay out matrices float32 [H, inputs, outputs] for the kernels, padded with zeros.

    Outputs are padded to a multiple of 16, and in OCT_BF16, which must be exact, inputs to pairs.
    """
    is_paired = format == abi.OCT_BF16
    heads, inputs, outputs = matrices.shape
    missing = -inputs % 2 if is_paired else 0, -outputs % TILE
    filled = np.pad(matrices, ((0, 0), (0, missing[0]), (0, missing[1])))
    if not is_paired:
        return np.ascontiguousarray(filled, np.float32 if format == abi.OCT_F32 else np.float16)
    bits = np.ascontiguousarray(filled, np.float32).view(np.uint32) >> 16
    pairs = bits.astype(np.uint16).reshape(heads, -1, 2, filled.shape[2])
    return np.ascontiguousarray(pairs.swapaxes(2, 3))
