"""The documents that the page shows: some of ``docs/``, in the order in which they are listed.

An installed octavo has them in ``documents`` beside this file, where ``setup.py`` puts them; a
checkout has them in ``docs``.
"""

from __future__ import annotations

from pathlib import Path

# The first is what "Docs" leads to. Their titles are the first lines of the documents.
NAMES = (
    "inference",
    "server",
    "planning",
    "simulation",
    "measuring",
    "metrics",
    "tuning",
    "quantization",
    "speculation",
    "long-context",
    "kv_offload",
    "architecture",
    "kernels",
)

_INSTALLED = Path(__file__).with_name("documents")
_CHECKOUT = Path(__file__).parent.parent.parent / "docs"


def paths() -> dict[str, Path]:
    """The documents by name; none of those that are not here."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    found = {name: folder / f"{name}.md" for name in NAMES}
    return {name: path for name, path in found.items() if path.is_file()}


def titles() -> dict[str, str]:
    """What each calls itself, by name."""
    return {
        name: path.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for name, path in paths().items()
    }
