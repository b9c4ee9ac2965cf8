"""The documents that the page shows, and their images: some of ``docs/``, in the order of the
list.

An installed octavo has them in ``documents`` beside this file, where ``setup.py`` puts them; a
checkout has them in ``docs``.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError

# The first is what "Docs" leads to. Their titles are the first lines of the documents.
NAMES = (
    "inference",
    "models",
    "server",
    "structured_output",
    "planning",
    "simulation",
    "measuring",
    "performance",
    "metrics",
    "tuning",
    "quantization",
    "speculation",
    "long-context",
    "kv_offload",
    "architecture",
    "glossary",
    "kernels",
)

_INSTALLED = Path(__file__).with_name("documents")
_CHECKOUT = Path(__file__).parent.parent.parent / "docs"


def paths() -> dict[str, Path]:
    """Return the documents by name, without those that are missing here."""
    found = {name: _folder() / f"{name}.md" for name in NAMES}
    return {name: path for name, path in found.items() if path.is_file()}


def image_paths() -> dict[str, Path]:
    """Return the images by their names in documents: ``pictures/NAME.webp``."""
    return {f"pictures/{path.name}": path for path in sorted(_folder().glob("pictures/*.webp"))}


def contents() -> dict[str, Any]:
    """Return the title of each document, and the size in pixels of each image, by name."""
    titles = {name: path.read_text("utf-8").partition("\n")[0] for name, path in paths().items()}
    return {
        "titles": {name: title.lstrip("# ") for name, title in titles.items()},
        "images": {name: _size_of(path) for name, path in image_paths().items()},
    }


def _folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def _size_of(image: Path) -> tuple[int, int]:
    """Return width and height of a lossy WebP, with or without transparency (RFC 9649)."""
    header = image.read_bytes()[:30]
    if header[12:16] == b"VP8X":
        width, height = header[24:27], header[27:30]  # each less one
        return 1 + int.from_bytes(width, "little"), 1 + int.from_bytes(height, "little")
    if header[12:16] == b"VP8 ":  # then it is that of the frame itself (RFC 6386, 9.1)
        width, height = struct.unpack("<HH", header[26:30])
        return width & 0x3FFF, height & 0x3FFF
    raise ConfigError(f"{image} is no lossy WebP: take it again with scripts/docs_pictures.py")
