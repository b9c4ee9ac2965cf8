"""Zeroed memory that the system allocates on first use."""

from __future__ import annotations

import numpy as np

_LINE_BYTES = 64


def lazy_zeros(num_bytes: int) -> np.ndarray:
    """Return zeros, uint8 [num_bytes] aligned to a cache line, whose pages exist once written.

    numpy gets pages that are zero already from the system, where torch would write zeros to them.
    So a large KV pool is allocated at once and takes memory as it fills.
    """
    data = np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -data.ctypes.data % _LINE_BYTES
    return data[start : start + num_bytes]
