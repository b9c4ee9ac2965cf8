"""Which files octavo has written, and that they are as they were written.

A file beside a model may have come with the model, and say of itself whatever its maker likes. So
octavo notes the digest of each file that it writes in a folder of its own, and believes no other:

    <folder>/<digest>.seal      JSON: the file as it was when it was last read through

A digest takes a second for each gigabyte or two, too long for every start. It is computed again
where size, inode or times of the file are not those of the note; the time of its last change is
set by the system alone, whoever writes to a file. Old notes of files that are gone are removed.
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
_OLD_SECONDS = 30 * 86400.0  # a disk may be away for a while


def digest(header: bytes, content: np.ndarray, num_threads: int) -> bytes:
    """SHA-256 of the header and of the digests of the pieces that ``content`` (uint8) is cut into.

    The same for any number of threads, each of which reads a piece at a time, and lets it go.
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
    """The folder of octavo's own that ``OCTAVO_PACKED_DIR`` names, if it does."""
    named = os.environ.get("OCTAVO_PACKED_DIR")
    return Path(named) if named else None


class Seals:
    """The notes in ``folder``, which belongs to octavo alone."""

    def __init__(self, folder: Path):
        self._folder = folder

    def check_writable(self) -> None:
        """OSError if no note can be made."""
        with NewFile(self._path(b"")):
            pass

    def add(self, digest: bytes, file: BinaryIO) -> None:
        """Note that an open file has this digest. OSError if that cannot be written."""
        note = {**_state(file), "path": os.path.abspath(file.name)}
        replace_file(self._path(digest), json.dumps(note).encode())
        for path in self._folder.glob("*.seal"):
            with suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # what is no note is left alone
                if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                    _remove_if_gone(path)

    def has(self, digest: bytes) -> bool:
        """Whether octavo has written a file of this digest."""
        return self._read(digest) is not None

    def is_current(self, digest: bytes, file: BinaryIO) -> bool:
        """Whether nothing has touched the open file since its digest was computed."""
        return {**(self._read(digest) or {}), "path": None} == {**_state(file), "path": None}

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.seal"

    def _read(self, digest: bytes) -> dict[str, Any] | None:
        """The note of a digest; None if there is none that only this user could have written."""
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
