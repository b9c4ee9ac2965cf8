"""The manifest of an engine folder, ``octavo.json``.

format, version     what kind of folder this is
octavo              the version that has made it
layout              of packed weights
source, sources     what it was made from: its name, and its files with their hashes
settings            the engine flags that it was built with
activations, quantization, weights_bytes, tokenizer, model, files, weights, constants, program
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.model_files import ENGINE_MANIFEST, ModelFolder
from octavo.kernels.cpu.activation_precision import ACTIVATIONS
from octavo.kernels.cpu.packed_weights import LAYOUT

FORMAT = "octavo engine"
VERSION = 1
WEIGHTS_FILE = "weights.packed"
CONSTANTS_FILE = "constants.bin"

_MAX_BYTES = 1 << 48  # of a file
_MAX_SHOWN = 1000  # characters of a source


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of the folder.

    Args:
        digest: as `octavo.kernels.cpu.file_digests.digest` has it, of its contents alone.
    """

    name: str
    num_bytes: int
    digest: bytes


def contents(file: BinaryIO) -> np.ndarray:
    """Return the bytes of a file, mapped: uint8."""
    size = file.seek(0, 2)
    if size == 0:  # nothing at all cannot be mapped
        return np.empty(0, dtype=np.uint8)
    return np.memmap(file, dtype=np.uint8, mode="r", shape=(size,))


class Manifest:
    """The manifest of a folder, with its head checked.

    Raises:
        ModelFileError: it is damaged.
        UnsupportedModelError: another version of octavo has made it.
    """

    def __init__(self, folder: ModelFolder):
        self.path = folder.path / ENGINE_MANIFEST
        values = folder.read_json(ENGINE_MANIFEST)
        if values is None:
            raise ModelFileError(folder.path, f"the folder has no {ENGINE_MANIFEST}")
        self.fields = fields = Fields(self.path, values)
        if fields.text("format") != FORMAT:
            raise fields.error("format", f"is not {FORMAT!r}: this is no engine folder")
        self.octavo = fields.text("octavo")
        self.source = fields.text("source")
        self._check_versions()
        self.settings: Mapping[str, Any] = fields.table("settings")
        self.activations: str = fields.text("activations")
        if self.activations not in ACTIVATIONS:
            raise fields.error("activations", f"is none of {', '.join(ACTIVATIONS)}")
        self.quantization: str | None = fields.text("quantization", None)
        self.files = self._files()

    def _check_versions(self) -> None:
        version, layout = self.fields.integer("version", minimum=0), self.fields.text("layout")
        for name, found, known in (("version", version, VERSION), ("layout", layout, LAYOUT)):
            if found != known:
                raise UnsupportedModelError(
                    f"{self.path} ({name}): {found!r:.40}, of octavo {self.octavo!r:.40}; this one "
                    f"reads {known!r} only. Build it again: {self.build_command()}"
                )

    def build_command(self, **settings: Any) -> str:
        """Return the command that makes such a folder, with other settings; it is safe to type."""
        is_plain = self.source.isprintable() and len(self.source) < _MAX_SHOWN
        source = shlex.quote(self.source) if is_plain else "MODEL"
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
        return " ".join(["octavo build", source, "OUT", *flags])

    def file(self, name: str) -> FolderFile:
        if name not in self.files:
            raise self.fields.error("files", f"{name} is not among those that were built")
        return self.files[name]

    def _files(self) -> dict[str, FolderFile]:
        table = self.fields.section("files")
        files = {}
        for name in table:
            entry = table.section(name)
            try:
                digest = bytes.fromhex(entry.text("digest"))
            except ValueError:
                raise entry.error("digest", "is no digest in hexadecimal digits") from None
            num_bytes = entry.integer("bytes", minimum=0, maximum=_MAX_BYTES)
            files[name] = FolderFile(name, num_bytes, digest)
        return files


def write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    head = {"format": FORMAT, "version": VERSION, "layout": LAYOUT}
    text = json.dumps({**head, **values}, ensure_ascii=False, separators=(",", ":"))
    (folder / ENGINE_MANIFEST).write_text(text + "\n", encoding="utf-8")
