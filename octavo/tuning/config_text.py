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


def config_text(
    path: str | Path,
    settings: Mapping[str, Any],
    notes: Sequence[str],
    reasons: Mapping[str, str] | None = None,
) -> str:
    """Return the contents of a file of settings, whose values are numbers, texts and booleans.

    Args:
        notes: paragraphs for readers, which come first.
        reasons: for readers too, by the names of the settings that they stand before.
    """
    check_name(path)
    between = _BETWEEN[Path(path).suffix]
    lines = [line for note in notes for line in _comment(note)]
    for name, value in settings.items():
        if reasons is not None:
            lines += ["", *_comment(reasons.get(name, ""))]
        # Numbers, texts, true and false are in YAML and in TOML what they are in JSON.
        lines.append(f"{name}{between}{json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(text, _WIDTH)]
