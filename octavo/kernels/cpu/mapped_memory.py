"""Memory of mapped files, given back as soon as it has been used."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def let_go(data: np.ndarray) -> None:
    """Give back the memory of a part of a mapped file that has been read or written. (The system
    may keep it, writes to the file what has been written, and brings it again to whoever reads it.)
    What is no part of one stays as it is."""
    mapped: Any = data
    while isinstance(mapped, np.ndarray | memoryview):
        mapped = mapped.base if isinstance(mapped, np.ndarray) else mapped.obj
    if not isinstance(mapped, mmap.mmap) or not hasattr(mapped, "madvise"):
        return
    first = np.frombuffer(mapped, np.uint8, 1).ctypes.data
    begin = -(-(data.ctypes.data - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (data.ctypes.data - first + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
