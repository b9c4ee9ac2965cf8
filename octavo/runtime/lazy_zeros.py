"""Memory that costs nothing before it is used."""

from __future__ import annotations

import numpy as np

_LINE_BYTES = 64


def lazy_zeros(num_bytes: int) -> np.ndarray:
    """Zeros (uint8, from the beginning of a cache line) that cost memory where they are written.

    numpy asks the system for pages that are zero already and that exist from their first use, where
    torch fills what it allocates. A large pool then starts at once and counts as it fills.
    """
    data = np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -data.ctypes.data % _LINE_BYTES
    return data[start : start + num_bytes]
