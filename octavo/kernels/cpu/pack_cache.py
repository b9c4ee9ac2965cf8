"""Packed weights on disk, so that only a model's first start has to pack them.

    <folder of the model>/.octavo/<name of the model>.v16
        8 bytes     "octavo16"
        8 bytes     length of the header, little-endian
        header      JSON: layout version, the model's files, where each weight is
        weights     each at a multiple of 64 bytes

The file is mapped, not read: what no step touches takes no memory, and processes share the rest.
It belongs to the model's files as they were: sizes and times of change are compared, and where
those differ, hashes. It is written under another name and then renamed, so that it is whole or not
there. Where the model's folder cannot be written to, it goes to ``<fallback>/`` instead; where
nothing can be written, weights are packed into memory at every start. ``OCTAVO_PACKED_DIR`` names
a folder to be used in place of both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packing import ALIGNMENT, PackedFormat, aligned, pack_into, packed_format
from octavo.quantization.base import Weight

# To be raised whenever the kernels read another order of bytes.
LAYOUT = "v16.1"
_MAGIC = b"octavo16"
_MAX_HEADER = 64 << 20

_log = logging.getLogger("octavo")

Progress = Callable[[int, int], None]


class PackedWeights:
    """The packed form of some weights, and the memory that it is in."""

    def __init__(self, memory: np.ndarray, entries: Mapping[str, tuple[PackedFormat, int]]):
        self._memory = memory  # uint8; its beginning is aligned
        self._entries = entries

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec, _ in self._entries.values())

    def struct(self, name: str) -> abi.Weight:
        """What the kernels take for a weight; valid as long as this object."""
        spec, offset = self._entries[name]
        return spec.as_struct(self._memory.ctypes.data + offset)


def open_or_pack(
    weights: Mapping[str, Weight],
    files: Sequence[Path],
    library: Library,
    pool: Pool,
    *,
    fallback: Path | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """The packed form of a model's ``weights``, by name; ``files`` are what they come from.

    ``progress`` is called with (bytes packed, bytes in all) if there was something to pack.
    """
    entries, end = _lay_out(weights, library)
    for path in _places(files, fallback):
        memory = _open(path, entries, files)
        if memory is not None:
            return PackedWeights(memory, entries)
    header = _header(entries, files)
    for path in _places(files, fallback):
        try:
            memory = _write(path, header, weights, entries, end, library, pool, progress)
        except OSError as error:
            _log.info("packed weights cannot be kept in %s: %s", path.parent, error)
            continue
        return PackedWeights(memory, entries)
    memory = aligned(end)
    _pack_all(weights, entries, memory, library, pool, progress)
    return PackedWeights(memory, entries)


def _lay_out(
    weights: Mapping[str, Weight], library: Library
) -> tuple[dict[str, tuple[PackedFormat, int]], int]:
    """(format, offset) of each weight, and the end of the last one."""
    entries, offset = {}, 0
    for name, weight in weights.items():
        spec = packed_format(weight, library)
        entries[name] = (spec, offset)
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return entries, offset


def _places(files: Sequence[Path], fallback: Path | None) -> list[Path]:
    if not files:
        return []
    first = files[0].absolute()
    key = hashlib.sha256(str(first).encode()).hexdigest()[:16]
    if folder := os.environ.get("OCTAVO_PACKED_DIR"):
        return [Path(folder) / f"{first.name}-{key}.v16"]
    places = [first.parent / ".octavo" / f"{first.name}.v16"]
    if fallback is not None:
        places.append(fallback / f"{first.name}-{key}.v16")
    return places


def _layout_json(entries: Mapping[str, tuple[PackedFormat, int]]) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "weights": {name: [*spec.as_tuple(), offset] for name, (spec, offset) in entries.items()},
    }


def _header(entries: Mapping[str, tuple[PackedFormat, int]], files: Sequence[Path]) -> bytes:
    header = _layout_json(entries)
    header["files"] = [{**_stamp(path), "sha256": _sha256(path)} for path in files]
    text = json.dumps(header).encode()
    start = len(_MAGIC) + 8 + len(text)
    return text + b" " * (-start % mmap.PAGESIZE)


def _stamp(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _open(
    path: Path, entries: Mapping[str, tuple[PackedFormat, int]], files: Sequence[Path]
) -> np.ndarray | None:
    """The mapped weights of a file that is whole and of this model, else None."""
    try:
        with open(path, "rb") as handle:
            prefix = handle.read(len(_MAGIC) + 8)
            length = int.from_bytes(prefix[len(_MAGIC) :], "little")
            if prefix[: len(_MAGIC)] != _MAGIC or length > _MAX_HEADER:
                return None
            header = json.loads(handle.read(length))
            start = len(prefix) + length
            if not isinstance(header, dict) or not _is_of(header, entries, files):
                return None
            end = max((offset + spec.num_bytes for spec, offset in entries.values()), default=0)
            if os.fstat(handle.fileno()).st_size < start + end:
                return None
            mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=(max(end, 1),))
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            _log.warning("%s cannot be used, weights are packed again: %s", path, error)
        return None
    return mapped


def _is_of(
    header: dict[str, Any],
    entries: Mapping[str, tuple[PackedFormat, int]],
    files: Sequence[Path],
) -> bool:
    known = header.pop("files", None)
    if header != _layout_json(entries) or not isinstance(known, list) or len(known) != len(files):
        return False
    for entry, path in zip(known, files, strict=True):
        stamp = _stamp(path)
        if not isinstance(entry, dict) or entry.get("size") != stamp["size"]:
            return False
        # A file that was copied or touched has another time, and maybe the same contents.
        if {**entry, "sha256": None} != {**stamp, "sha256": None} and (
            entry.get("sha256") != _sha256(path)
        ):
            return False
    return True


def _write(
    path: Path,
    header: bytes,
    weights: Mapping[str, Weight],
    entries: Mapping[str, tuple[PackedFormat, int]],
    size: int,
    library: Library,
    pool: Pool,
    progress: Progress | None,
) -> np.ndarray:
    """Pack into a new file at ``path``, and map it. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "r+b") as out:
            prefix = _MAGIC + len(header).to_bytes(8, "little")
            start = len(prefix) + len(header)
            # Ask for the space first: a full disk is an error here, and a crash later.
            os.posix_fallocate(out.fileno(), 0, start + max(size, 1))
            out.write(prefix + header)
            out.flush()
            memory = np.memmap(out, dtype=np.uint8, mode="r+", offset=start, shape=(max(size, 1),))
            _pack_all(weights, entries, memory, library, pool, progress)
            memory.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=(max(size, 1),))


def _pack_all(
    weights: Mapping[str, Weight],
    entries: Mapping[str, tuple[PackedFormat, int]],
    memory: np.ndarray,
    library: Library,
    pool: Pool,
    progress: Progress | None,
) -> None:
    done, total = 0, sum(spec.num_bytes for spec, _ in entries.values())
    for name, (spec, offset) in entries.items():
        pack_into(weights[name], spec, memory.ctypes.data + offset, library, pool)
        done += spec.num_bytes
        if progress is not None:
            progress(done, total)
