"""Digests of the files that octavo has written, as proof that they are unchanged.

A file beside a model may have come with the model, and claim anything. So octavo notes the digest
of each file that it writes in a folder of its own, and trusts no other file:

    <folder>/<digest>.seal      JSON: the file as it was when it was last read through

A digest takes a second for each gigabyte or two, too long for every start. It is computed again if
size, inode or times of the file differ from the note; the time of the last change is set by the
system alone. Old notes of files that no longer exist are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.base.files import NewFile, replace_file
from octavo.kernels.cpu.mapped_memory import let_go
from octavo.system import machine

DIGEST_BYTES = 32
_CHUNK_BYTES = 16 << 20
_MAX_SEAL_BYTES = 1 << 16
_OLD_SECONDS = 30 * 86400.0  # a disk may be unmounted for a while


def digest(header: bytes, content: np.ndarray, num_threads: int) -> bytes:
    """SHA-256 of the header and of the digests of the pieces of ``content`` (uint8).

    The same for any number of threads, each of which reads a piece at a time and then releases it.
    """
    from concurrent.futures import ThreadPoolExecutor

    def digest_of(piece: np.ndarray) -> bytes:
        result = hashlib.sha256(piece.data).digest()
        let_go(piece)
        return result

    whole = hashlib.sha256(header)
    pieces = (content[i : i + _CHUNK_BYTES] for i in range(0, len(content), _CHUNK_BYTES))
    with ThreadPoolExecutor(num_threads) as threads:
        for each in threads.map(digest_of, pieces):
            whole.update(each)
    return whole.digest()


def named_home() -> Path | None:
    """The folder that ``OCTAVO_PACKED_DIR`` names, if it is set."""
    named = os.environ.get("OCTAVO_PACKED_DIR")
    return Path(named) if named else None


class Seals:
    """The notes in ``folder``, which belongs to octavo alone."""

    def __init__(self, folder: Path):
        self._folder = folder

    def check_writable(self) -> None:
        """Raise OSError if no note can be written."""
        with NewFile(self._path(b"")):
            pass

    def add(self, digest: bytes, file: BinaryIO) -> None:
        """Note the digest of an open file; OSError if that cannot be written."""
        note = {**_state(file), "path": os.path.abspath(file.name)}
        replace_file(self._path(digest), json.dumps(note).encode())
        for path in self._folder.glob("*.seal"):
            with suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # what is no note is left alone
                if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                    _remove_if_gone(path)

    def has(self, digest: bytes) -> bool:
        """True if octavo has written a file of this digest."""
        return self._read(digest) is not None

    def is_current(self, digest: bytes, file: BinaryIO) -> bool:
        """True if the open file is unchanged since its digest was computed."""
        return {**(self._read(digest) or {}), "path": None} == {**_state(file), "path": None}

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.seal"

    def _read(self, digest: bytes) -> dict[str, Any] | None:
        """The note of a digest; None without one that only this user could have written."""
        try:
            with open(self._path(digest), "rb") as file:
                status = os.fstat(file.fileno())
                if not machine.is_own(status) or status.st_mode & 0o022:
                    return None
                note = json.loads(file.read(_MAX_SEAL_BYTES))
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) else None


def _state(file: BinaryIO) -> dict[str, int]:
    status = os.fstat(file.fileno())
    return {
        "size": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _remove_if_gone(seal: Path) -> None:
    is_old = time.time() - seal.stat().st_mtime > _OLD_SECONDS
    if is_old and not os.path.exists(json.loads(seal.read_bytes())["path"]):
        seal.unlink()
