"""Packed weights in one piece of memory, mapped or not, each at a multiple of 64 bytes.

entries, size = lay_out(weights, library)       assigns offsets
pack_all(weights, entries, memory, ...)         packs
PackedWeights(memory, entries).struct(name)     what the kernels take
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import IO

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import TILE
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.mapped_memory import let_go
from octavo.kernels.cpu.packing import (
    ALIGNMENT,
    PackedFormat,
    aligned,
    in_place,
    pack_into,
    packed_format,
    plain_format,
    write_columns,
)
from octavo.quantization.base import Weight

# Increase it when the byte layout of kernels changes.
LAYOUT = "v16.3"

_PIECE_BYTES = 16 << 20  # of a weight in its file, packed at a time

Progress = Callable[[int, int], None]
Entries = Mapping[str, tuple[PackedFormat, int]]  # format and offset of each weight
Stored = Mapping[str, tuple[PackedFormat, np.ndarray]]  # format and rows of each weight


class PackedWeights:
    """The packed form of some weights, and the memory that holds it.

    ``stored``: other weights, which the kernels read as the model's files store them.
    """

    def __init__(self, memory: np.ndarray, entries: Entries, stored: Stored = MappingProxyType({})):
        self._memory = memory  # uint8; its beginning is aligned
        self._entries = entries
        self._stored = stored

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec, _ in self._entries.values())

    def copied(
        self, rows: Mapping[str, range], bind: Callable[[int, int], object]
    ) -> PackedWeights:
        """Return a copy of some rows of each weight, at their offsets: the rest takes no memory.

        ``bind``: called with the address and the size of the copy before it is written.
        """
        memory = aligned(len(self._memory))
        bind(memory.ctypes.data, memory.nbytes)
        for name, (spec, offset) in self._entries.items():
            tile_bytes = spec.columns_at // -(-spec.n // TILE)
            tiles = range(rows[name].start // TILE, -(-rows[name].stop // TILE))
            for begin, end in (
                (tiles.start * tile_bytes, tiles.stop * tile_bytes),
                (spec.columns_at, spec.num_bytes),
            ):
                memory[offset + begin : offset + end] = self._memory[offset + begin : offset + end]
        return PackedWeights(memory, self._entries, self._stored)

    def struct(self, name: str) -> abi.Weight:
        """The struct of a weight for the kernels; valid as long as this object."""
        if name in self._stored:
            spec, rows = self._stored[name]
            return spec.as_struct(rows.ctypes.data)
        spec, offset = self._entries[name]
        return spec.as_struct(self._memory.ctypes.data + offset)


def lay_out(
    weights: Mapping[str, Weight], library: Library
) -> tuple[dict[str, tuple[PackedFormat, int]], int]:
    """Assign (format, offset) to each weight, and return also the end of the last one."""
    entries, offset = {}, 0
    for name, weight in weights.items():
        spec = packed_format(weight, library)
        entries[name] = (spec, offset)
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, 1)  # an empty file cannot be mapped


def as_stored(weights: Mapping[str, Weight], library: Library) -> Stored:
    """The weights that need no packing, since the kernels can read them in place."""
    found = {name: in_place(weight, library) for name, weight in weights.items()}
    return {name: stored for name, stored in found.items() if stored is not None}


def end_of(entries: Entries) -> int:
    """End of the last weight, without the padding to a multiple of 64 bytes."""
    return max((offset + spec.num_bytes for spec, offset in entries.values()), default=1)


def reserve(file: IO[bytes], size: int) -> None:
    """Allocate ``size`` bytes of a new file on the disk too, so that writing into its memory cannot
    fail."""
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
    rows: Mapping[str, range] = MappingProxyType({}),
) -> None:
    """Pack every weight, or only some ``rows`` of it, into its place.

    ``memory`` (uint8) begins at a multiple of 64 bytes.

    Weights are packed in pieces, whose memory is released at once: only a piece of a mapped file is
    resident at a time, instead of the largest matrix or all that has been packed.
    """
    done, total = 0, sum(spec.columns_at for spec, _ in entries.values())
    for name, (spec, offset) in entries.items():
        if spec.is_reordered:
            write_columns(weights[name], spec, memory[offset:])
        wanted = rows.get(name, range(spec.n))
        for begin, part, piece in _pieces(weights[name], spec, library):
            if begin < wanted.stop and wanted.start < begin + piece.n:
                packed = memory[offset : offset + piece.num_bytes]
                pack_into(part, piece, packed.ctypes.data, library, pool)
                for memory_of_file in (*part.mapped, packed):
                    let_go(memory_of_file)
            offset += piece.num_bytes
            done += piece.num_bytes
            if progress is not None:
                progress(done, total)


def _pieces(
    weight: Weight, spec: PackedFormat, library: Library
) -> Iterator[tuple[int, Weight, PackedFormat]]:
    """Cut a weight into whole tiles of rows, each with the number of its first; concatenated, the
    packed pieces are the packed weight."""
    row_bytes = max(weight.nbytes // spec.n, 1)
    step = max(_PIECE_BYTES // row_bytes // TILE, 1) * TILE
    for begin in range(0, spec.n, step):
        rows = min(step, spec.n - begin)
        piece = plain_format(spec.format, rows, spec.k, spec.group, library)
        yield begin, weight.narrow(begin, begin + rows), piece
