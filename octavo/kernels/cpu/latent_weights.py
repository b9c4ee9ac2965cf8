"""What makes keys and values of latent vectors, as the native kernels read it.

A model has one matrix for both, ``kv_b`` [H * (P + V), C]. Queries are multiplied with the keys'
part of a head, and what was attended with the values' part: small products, each of a head of its
own. So there is a copy of both in floats, input by input (``oct_latent_args``): of 2 bytes a
number, or 4 where the weight has as many. DeepSeek-V2-Lite has 4 MiB of it a layer, V3 has 32.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import TILE
from octavo.kernels.cpu.library import Library, Pool


class HeadMatrices(NamedTuple):
    """Of all heads: for keys [H, P, C], for values [H, C, V], the last dimension filled up with
    zeros to a multiple of 16."""

    format: int  # OCT_F32 or OCT_F16
    keys: np.ndarray
    values: np.ndarray


def head_matrices(
    packed: abi.Weight, num_heads: int, nope_dim: int, library: Library, pool: Pool
) -> HeadMatrices:
    """Of a ``kv_b`` in any packed format; ``nope_dim`` is P."""
    floats = np.empty((packed.n, packed.k), dtype=np.float32)
    library.check(library.lib.oct_unpack(pool, ctypes.byref(packed), floats.ctypes.data))
    heads = floats.reshape(num_heads, -1, packed.k)
    is_wide = packed.format == abi.OCT_F32
    dtype = np.float32 if is_wide else np.float16
    return HeadMatrices(
        abi.OCT_F32 if is_wide else abi.OCT_F16,
        _filled_up(heads[:, :nope_dim], dtype),
        _filled_up(heads[:, nope_dim:].transpose(0, 2, 1), dtype),
    )


def _filled_up(matrices: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    missing = -matrices.shape[-1] % TILE
    return np.ascontiguousarray(np.pad(matrices, ((0, 0), (0, 0), (0, missing))), dtype)
