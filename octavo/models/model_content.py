"""The fingerprint of a model's files, by which processes know that they have the same model.

    fingerprint(path)     {"digest of the model's settings": "5f0c...", ...}
    change_times(path)    {"model.gguf": 1764368511000000000}

Where the files lie, and when they were written, does not matter to a fingerprint. Each part is a
SHA-256, so that a difference says what differs:

    settings    config, tokenizer and chat templates: all files of JSON and of Jinja, whole
    tables      what weight files say of their tensors, whole: names, types, shapes and places; in
                GGUF files also the config and the tokenizer
    weights     of each tensor the first, middle and last page, and of long ones a piece of each
                four MiB besides

All of a file would take as long as loading it. So what is not found is a change of some weights
between these pieces alone, as of a few rows of a matrix: another training changes all, and another
quantization changes tables too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo.base.model_files import split_parts

Fingerprint = dict[str, str]

_PAGE_BYTES = 4096
_EACH_BYTES, _PIECE_BYTES = 4 << 20, 1 << 16
_SETTINGS = (".json", ".jinja")
_TEMPLATES = "additional_chat_templates"
# Of an engine folder, whose manifest has the digests of all bytes of these.
_PACKED = (".packed", ".bin")
_NUM_DIGITS = 32

Place = tuple[int, int]  # of a tensor in its file: offset and number of bytes


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a model, a folder or a GGUF file, by its parts.

    Raises:
        ModelFileError: a file of weights is damaged. OSError: one cannot be read.
    """
    settings, tables, weights = (hashlib.sha256() for _ in range(3))
    for file in _files_of(path):
        if file.suffix in _SETTINGS:
            _add(settings, file.name.encode(), file.read_bytes())
            continue
        places = list(_places_in(file))
        size = file.stat().st_size
        with open(file, "rb") as opened:
            begin = min((offset for offset, _ in places), default=0)
            _add(tables, file.suffix.encode(), size.to_bytes(8, "little"), opened.read(begin))
            for offset, num_bytes in places:
                for piece in _pieces(offset, num_bytes):
                    _add(weights, _read(opened, *piece))
    named = (("settings", settings), ("tables", tables), ("weights", weights))
    return {f"digest of the model's {name}": part.hexdigest()[:_NUM_DIGITS] for name, part in named}


def change_times(path: Path) -> dict[str, int]:
    """Return when each file of a model was last changed, in nanoseconds: on one machine, that
    tells of changes which a fingerprint does not see. OSError: a file cannot be read."""
    return {file.name: file.stat().st_mtime_ns for file in _files_of(path)}


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the files that count, in the order of their names."""
    if not path.is_dir():
        yield from (path.parent / name for name in split_parts(path.name))
        return
    for folder in (path, path / _TEMPLATES):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.is_file() and file.suffix in (*_SETTINGS, ".safetensors", ".gguf", *_PACKED):
                yield file


def _places_in(file: Path) -> Iterator[Place]:
    """Yield the places of the tensors of a file; one place for a file that has no table."""
    if file.suffix == ".safetensors":
        from octavo.models.safetensors import SafetensorsFile

        yield from SafetensorsFile(file).places
    elif file.suffix in _PACKED:
        yield 0, file.stat().st_size
    else:
        from octavo.models.gguf import GGUFFile

        with GGUFFile(file) as opened:
            yield from [(tensor.offset, tensor.num_bytes) for tensor in opened.tensors.values()]


def _pieces(offset: int, num_bytes: int) -> Iterator[Place]:
    """Yield the places of a tensor's pieces."""
    page = min(_PAGE_BYTES, num_bytes)
    for begin in (0, (num_bytes - page) // 2, num_bytes - page):
        yield offset + begin, page
    for begin in range(_EACH_BYTES, num_bytes, _EACH_BYTES):
        yield offset + begin, min(_PIECE_BYTES, num_bytes - begin)


def _read(opened: BinaryIO, offset: int, num_bytes: int) -> bytes:
    opened.seek(offset)
    return opened.read(num_bytes)


def _add(digest: hashlib._Hash, *parts: bytes) -> None:
    """Add parts, each with its length, so that none can pass for two others."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
