"""Packed weights on disk, so that only a model's first start has to pack them.

    <folder of the model>/.octavo/<name of the model>.v16
        8 bytes     "octavo16"
        8 bytes     length of the header, little-endian
        32 bytes    digest of all that follows (file_digests.py)
        header      JSON: layout version, the model's files, where each weight is
        weights     each at a multiple of 64 bytes

The file is mapped, not read: pages that no step touches take no memory, and processes share the
rest. It belongs to the model's files as they were: sizes and times of change are compared, and
where those differ, hashes. It is trusted only if octavo's own notes have its digest, since it may
have come with the model, or be damaged. It is complete or does not exist (`octavo/base/files.py`).

The notes are in ``home``, a folder of octavo's own, and so are packed weights if the model's folder
is not writable; if nothing is, weights are packed into memory at every start. ``OCTAVO_PACKED_DIR``
names a folder that replaces both.

For a model that is mostly floats no file is written, unless a folder is named or memory would not
hold it: the file would be as large as the model, and packing into memory takes less than a second
of a core for each gigabyte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.base.files import NewFile, sha256_of
from octavo.kernels.cpu.file_digests import DIGEST_BYTES, Seals, digest, named_home
from octavo.kernels.cpu.format_advice import advise
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packed_weights import (
    LAYOUT,
    Entries,
    PackedWeights,
    Progress,
    as_stored,
    end_of,
    lay_out,
    pack_all,
    reserve,
)
from octavo.kernels.cpu.packing import aligned
from octavo.quantization.base import Weight
from octavo.system import machine

_MAGIC = b"octavo16"
_PREFIX_BYTES = len(_MAGIC) + 8 + DIGEST_BYTES
_MAX_HEADER = 64 << 20

_log = logging.getLogger("octavo")


def open_or_pack(
    weights: Mapping[str, Weight],
    files: Sequence[Path],
    library: Library,
    pool: Pool,
    *,
    home: Path | None = None,
    gathered: Set[str] = frozenset(),
    rows: Mapping[str, range] = MappingProxyType({}),
    progress: Progress | None = None,
) -> PackedWeights:
    """Return the packed form of a model's ``weights``, by name; ``files`` are the model's files.

    ``gathered``: weights of which steps read some rows only. They are not packed if rows can be
    read from the model's file as it is.
    ``home``: a folder of octavo's own; without one, nothing is written.
    ``rows``: those that will be read of each weight, all by default. Where nothing is written, the
    others are not packed, and take no memory.
    ``progress`` is called with (bytes packed, bytes in all) if weights are packed.
    """
    stored = as_stored({name: weights[name] for name in gathered}, library)
    weights = {name: weight for name, weight in weights.items() if name not in stored}
    entries, size = lay_out(weights, library)
    advise(weights, entries)

    def pack(memory: np.ndarray, rows: Mapping[str, range] = MappingProxyType({})) -> None:
        pack_all(weights, entries, memory, library, pool, progress, rows)

    named = named_home()
    home = named or home
    if home is None or not files:
        memory = None
    else:
        places = _places(files[0].absolute(), home, beside=not named)
        seals = Seals(home)
        memory = _open_any(places, entries, files, seals, pool.size)
        if memory is None and (named or _is_worth_a_file(weights.values(), size)):
            memory = _write_any(places, entries, files, seals, pool.size, size, pack)
    if memory is None:
        memory = aligned(size)
        pack(memory, rows)
    return PackedWeights(memory, entries, stored)


def _is_worth_a_file(weights: Collection[Weight], size: int) -> bool:
    quantized = sum(weight.nbytes for weight in weights if weight.is_quantized)
    is_quantized = quantized > sum(weight.nbytes for weight in weights) / 2
    return is_quantized or size > machine.usable_memory_bytes()


def _places(first: Path, home: Path, beside: bool) -> list[Path]:
    key = hashlib.sha256(str(first).encode()).hexdigest()[:16]
    own = home / f"{first.name}-{key}.v16"
    return [first.parent / ".octavo" / f"{first.name}.v16", own] if beside else [own]


def _layout_json(entries: Entries) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "weights": {name: [*spec.as_tuple(), offset] for name, (spec, offset) in entries.items()},
    }


def _header(entries: Entries, files: Sequence[Path]) -> bytes:
    header = _layout_json(entries)
    header["files"] = [{**_stamp(path), "sha256": sha256_of(path)} for path in files]
    text = json.dumps(header).encode()
    return text + b" " * (-(_PREFIX_BYTES + len(text)) % mmap.PAGESIZE)


def _stamp(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _open_any(
    places: Sequence[Path],
    entries: Entries,
    files: Sequence[Path],
    seals: Seals,
    num_threads: int,
) -> np.ndarray | None:
    """Map the weights from the first place that has this model's, as octavo wrote them."""
    for path in places:
        try:
            memory = _open(path, entries, files, seals, num_threads)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used, weights are packed again: %s", path, error)
            continue
        if memory is not None:
            return memory
    return None


def _open(
    path: Path,
    entries: Entries,
    files: Sequence[Path],
    seals: Seals,
    num_threads: int,
) -> np.ndarray | None:
    """Map the weights of a file; None if it is another model's, ValueError if it is damaged."""
    with open(path, "rb") as handle:
        prefix = handle.read(_PREFIX_BYTES)
        length = int.from_bytes(prefix[len(_MAGIC) : -DIGEST_BYTES], "little")
        expected = prefix[-DIGEST_BYTES:]
        if prefix[: len(_MAGIC)] != _MAGIC or length > _MAX_HEADER:
            return None
        if not seals.has(expected):
            _log.info("%s is not used: octavo's notes do not have it", path)
            return None
        text = handle.read(length)
        header = json.loads(text)
        if not isinstance(header, dict) or not _is_of(header, entries, files):
            return None
        start, size = len(prefix) + len(text), end_of(entries)
        if os.fstat(handle.fileno()).st_size < start + size:
            raise ValueError("it has been cut off")
        memory = np.memmap(handle, dtype=np.uint8, mode="r", offset=start, shape=(size,))
        if not seals.is_current(expected, handle):
            if digest(text, memory, num_threads) != expected:
                raise ValueError("its contents are not those that were written")
            seals.add(expected, handle)
        return memory


def _is_of(
    header: dict[str, Any],
    entries: Entries,
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
            entry.get("sha256") != sha256_of(path)
        ):
            return False
    return True


def _write_any(
    places: Sequence[Path],
    entries: Entries,
    files: Sequence[Path],
    seals: Seals,
    num_threads: int,
    size: int,
    pack: Callable[[np.ndarray], None],
) -> np.ndarray | None:
    """Write the weights that ``pack`` makes to a new file in the first possible place, and map
    it."""
    try:
        seals.check_writable()
    except OSError as error:
        _log.warning("weights are packed at every start, as nothing can be noted: %s", error)
        return None
    header = _header(entries, files)
    for path in filter(_may_be_written, places):
        try:
            return _write(path, header, size, end_of(entries), seals, num_threads, pack)
        except OSError as error:
            _log.info("packed weights cannot be kept in %s: %s", path.parent, error)
    return None


def _may_be_written(path: Path) -> bool:
    """True unless the file is another user's, or the model's folder links elsewhere."""
    try:
        return not path.parent.is_symlink() and machine.is_own(path.lstat())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _write(
    path: Path,
    header: bytes,
    size: int,
    end: int,
    seals: Seals,
    num_threads: int,
    pack: Callable[[np.ndarray], None],
) -> np.ndarray:
    start = _PREFIX_BYTES + len(header)
    with NewFile(path) as new:
        new.file.write(bytes(_PREFIX_BYTES) + header)
        # Ask for the space first: a full disk is an error here, and a crash later.
        reserve(new.file, start + size)
        memory = np.memmap(new.file, dtype=np.uint8, mode="r+", offset=start, shape=(size,))
        pack(memory)
        memory.flush()
        written = digest(header, memory[:end], num_threads)
        new.file.seek(0)
        new.file.write(_MAGIC + len(header).to_bytes(8, "little") + written)
        new.publish(mode=0o600, sync=True)
    with open(path, "rb") as handle:
        seals.add(written, handle)
        return np.memmap(handle, dtype=np.uint8, mode="r", offset=start, shape=(size,))
