"""A digest of what a model's files contain, by which two machines know that they have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from octavo.base.model_files import split_parts

# A piece of each so many bytes is read, since reading all would take as long as loading; so any
# matrix of that size has a part in the digest.
_EACH_BYTES, _PIECE_BYTES = 4 << 20, 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_SETTINGS = {"config.json", "quantize_config.json", "hf_quant_config.json"}


def model_content(path: Path) -> str:
    """Return the digest of a model, a file or a folder: of its weights and of what says how they
    are read. Where the files lie, and when they were written, does not matter.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in _files_of(path):
        with open(file, "rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.suffix}\0{size}\0".encode())
            for begin in (*range(0, size, _EACH_BYTES), max(0, size - _PIECE_BYTES)):
                opened.seek(begin)
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()


def _files_of(path: Path) -> Iterable[Path]:
    """Yield the files that count, in the order of their names."""
    if not path.is_dir():
        yield from (path.parent / name for name in split_parts(path.name))
        return
    for file in sorted(path.iterdir()):
        if file.is_file() and (file.suffix in _WEIGHTS or file.name in _SETTINGS):
            yield file
