"""Release of the memory of mapped files after use."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def let_go(data: np.ndarray) -> None:
    """Release the memory of a part of a mapped file that has been read or written.

    The system writes changes to the file, and reads the part again when it is used. Other arrays
    are left alone.
    """
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
