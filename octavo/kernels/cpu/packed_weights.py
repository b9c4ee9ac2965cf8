"""Packed weights in one piece of memory, each at a multiple of 64 bytes: of a file, or not.

entries, size = lay_out(weights, library)       what goes where
pack_all(weights, entries, memory, ...)         and there it goes
PackedWeights(memory, entries).struct(name)     what the kernels are handed
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packing import ALIGNMENT, PackedFormat, pack_into, packed_format
from octavo.quantization.base import Weight

# To be raised whenever the kernels read another order of bytes.
LAYOUT = "v16.2"

Progress = Callable[[int, int], None]
Entries = Mapping[str, tuple[PackedFormat, int]]  # format and offset of each weight


class PackedWeights:
    """The packed form of some weights, and the memory that it is in."""

    def __init__(self, memory: np.ndarray, entries: Entries):
        self._memory = memory  # uint8; its beginning is aligned
        self._entries = entries

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec, _ in self._entries.values())

    def struct(self, name: str) -> abi.Weight:
        """What the kernels take for a weight; valid as long as this object."""
        spec, offset = self._entries[name]
        return spec.as_struct(self._memory.ctypes.data + offset)


def lay_out(
    weights: Mapping[str, Weight], library: Library
) -> tuple[dict[str, tuple[PackedFormat, int]], int]:
    """(format, offset) of each weight, and the end of the last one."""
    entries, offset = {}, 0
    for name, weight in weights.items():
        spec = packed_format(weight, library)
        entries[name] = (spec, offset)
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, 1)  # nothing at all cannot be mapped


def end_of(entries: Entries) -> int:
    """The end of the last weight, without what fills up to the next multiple of 64 bytes."""
    return max((offset + spec.num_bytes for spec, offset in entries.values()), default=1)


def reserve(file: IO[bytes], size: int) -> None:
    """Make a new file so long, on the disk too, that writing into its memory cannot fail."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    missing = size - file.tell()  # on macOS there is no such call
    while missing > 0:
        missing -= file.write(bytes(min(missing, 1 << 20)))
    file.flush()


def pack_all(
    weights: Mapping[str, Weight],
    entries: Entries,
    memory: np.ndarray,
    library: Library,
    pool: Pool,
    progress: Progress | None,
) -> None:
    """Pack every weight into its place; ``memory`` (uint8) begins at a multiple of 64 bytes."""
    done, total = 0, sum(spec.num_bytes for spec, _ in entries.values())
    for name, (spec, offset) in entries.items():
        pack_into(weights[name], spec, memory.ctypes.data + offset, library, pool)
        _let_go(weights[name].data)
        done += spec.num_bytes
        if progress is not None:
            progress(done, total)


def _let_go(data: np.ndarray) -> None:
    """Give back the memory of a mapped file's part that has been read. (The system may keep it, and
    whoever reads it again gets it again.) So a model is in memory once, and not twice."""
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
