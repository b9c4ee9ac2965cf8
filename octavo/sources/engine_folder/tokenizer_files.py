"""The files of the tokenizer in an engine folder.

Of a Hugging Face folder, the files as they were. Of a GGUF file, its metadata of the tokenizer as
JSON, which is read in a quarter of the time of a GGUF header; then the same code makes the same
tokenizer of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ModelFileError
from octavo.base.model_files import ModelFolder
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.tokenizer import Tokenizer

GGUF_FILE = "tokenizer.gguf.json"
KINDS = ("folder", "gguf")


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy the files of a folder's tokenizer; returns their names, relative to both folders."""
    copied = names(ModelFolder(source), "folder")
    for name in copied:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return copied


def write_metadata(metadata: Mapping[str, Any], target: Path) -> list[str]:
    """Write the tokenizer's part of a GGUF file's metadata; returns the names of the files."""
    kept = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in metadata.items()
        if key.startswith("tokenizer.") or key == "general.name"
    }
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    (target / GGUF_FILE).write_text(text, encoding="utf-8")
    return [GGUF_FILE]


def names(folder: ModelFolder, kind: str) -> list[str]:
    """Return the files of a folder that ``load`` reads."""
    if kind == "gguf":
        return [GGUF_FILE]
    from octavo.text.folder_tokenizer import tokenizer_files

    return [path.relative_to(folder.path).as_posix() for path in tokenizer_files(folder)]


def load(folder: ModelFolder, kind: str) -> Tokenizer:
    """Return the tokenizer of a folder. ModelFileError if it is damaged."""
    if kind == "folder":
        return load_folder_tokenizer(folder.path)
    metadata = folder.read_json(GGUF_FILE)
    if metadata is None:
        raise ModelFileError(folder.path / GGUF_FILE, "there is no such file")
    return load_gguf_tokenizer(metadata, folder.path / GGUF_FILE)
