"""Reads the files of models, which may come from anyone.

    ModelFolder     the files of a folder by name, none of which is anywhere else
    split_parts     the names of all parts of a GGUF file that was split

Errors in a file are a ModelFileError that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, ModelFileError

# A folder with this file is an engine folder; see `octavo.sources.engine_folder`.
ENGINE_MANIFEST = "octavo.json"

# The index of the largest checkpoints takes a few MB.
MAX_JSON_BYTES = 64 << 20

_NAME = re.compile(r"[^/\\\0]+")
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class ModelFolder:
    """A folder with a model. Files outside of it are not read.

    Links are followed within the folder, and into the blobs of a Hugging Face cache, whose snapshot
    folders hold nothing but links; and into the folders that ``also`` names.
    """

    def __init__(self, path: Path, *also: Path):
        self.path = path
        folder = path.resolve()
        self._allowed = [folder, *also]
        if folder.parent.name == "snapshots":
            self._allowed.append(folder.parent.parent / "blobs")

    def find(self, name: str, *, named_in: Path | None = None) -> Path | None:
        """Return the file ``name``, None if there is none; ``named_in`` is the file that refers
        to it."""
        path = self.path / name
        if not all(map(_NAME.fullmatch, name.split("/"))) or ".." in path.parts:
            raise ModelFileError(named_in or self.path, f"{name!r:.100} is no name of a file in it")
        try:
            if not path.is_symlink() and not path.exists():
                return None
            if not path.is_file():
                raise ModelFileError(path, "is no file, or a link to one that is not there")
            target = path.resolve()
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error
        if not any(target.is_relative_to(place) for place in self._allowed):
            raise ModelFileError(
                named_in or path,
                f"{name} is a link that leads out of the folder, to {target}: copy the file here",
            )
        return path

    def find_all(self, folder: str, pattern: str) -> Iterator[Path]:
        """Return the files of a folder inside this one whose names match ``pattern``, sorted."""
        for path in sorted((self.path / folder).glob(pattern)):
            if (found := self.find(f"{folder}/{path.name}")) is not None:
                yield found

    def read_text(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> str | None:
        """Return the contents of ``name``, None if there is no such file."""
        path = self.find(name)
        return None if path is None else read_text(path, max_bytes)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in ``name``, None if there is no such file."""
        path = self.find(name)
        return None if path is None else _read_object(path)


def is_engine_folder(path: Path) -> bool:
    return (path / ENGINE_MANIFEST).exists()


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file, whatever its name is, begins as a GGUF file does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error


def read_text(path: Path, max_bytes: int) -> str:
    """Return the contents of a file of UTF-8."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelFileError(path, f"{size:,} bytes; {max_bytes:,} are allowed")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(path, "not UTF-8", offset=error.start) from error
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    text = read_text(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
        if _HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(path, "a text has half a character (a lone surrogate)") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, "is not a JSON object")
    return value


def split_parts(name: str) -> list[str]:
    """Return the names of all parts of the GGUF file to which ``name`` belongs; itself, if not
    split."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def check_free(out: Path) -> None:
    """Raise ConfigError unless a folder can be written at ``out``: nothing is there, or an empty
    folder. To be asked before hours of work are to be put there."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        what = "an engine folder" if is_engine_folder(out) else "there"
        raise ConfigError(
            f"{out} is {what} already, and is not overwritten: remove it, or name another folder"
        )
