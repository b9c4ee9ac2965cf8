"""Settings as the file that ``octavo serve --config`` reads: YAML, or TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from octavo.base.errors import ConfigError

_BETWEEN = {".yaml": ": ", ".yml": ": ", ".toml": " = "}

_WIDTH = 98  # of notes


def check_name(path: str | Path) -> None:
    """Raise ConfigError if the suffix is of no format that is written."""
    if Path(path).suffix not in _BETWEEN:
        raise ConfigError(f"{path}: a config file is written as .yaml or .toml")


def config_text(path: str | Path, settings: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return the contents of a file of settings, whose values are numbers, texts and booleans.

    ``notes``: paragraphs for readers, which come first.
    """
    check_name(path)
    between = _BETWEEN[Path(path).suffix]
    lines = [f"# {line}" for note in notes for line in wrap(note, _WIDTH)]
    # Numbers, texts, true and false are in YAML and in TOML what they are in JSON.
    lines += [f"{name}{between}{json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"
