"""A hash of the model and of the software that KV depends on, beside salt and tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from octavo.base.model_files import split_parts

# Pieces of a file that are read, spread from its begin to its end.
_PIECES, _PIECE_BYTES = 16, 1 << 16


def identity_of(path: Path, about: str) -> bytes:
    """Return a hash of a model's files, and of ``about``, a text with all else that KV depends on.

    A file counts by its name, its size, its time of change, and parts of its content, since reading
    all would take as long as loading it.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(about.encode())
    for file in _files_of(path):
        _add_file(digest, file)
    return digest.digest()


def _files_of(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file())
    return [path.parent / name for name in split_parts(path.name)]


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with open(path, "rb") as file:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        for index in range(_PIECES):
            file.seek(max(0, status.st_size - _PIECE_BYTES) * index // (_PIECES - 1))
            digest.update(file.read(_PIECE_BYTES))
