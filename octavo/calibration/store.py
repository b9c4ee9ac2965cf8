"""Stores calibrations on disk, in a file for each model, processor and way of running it.

$OCTAVO_HOME/calibrations/<name>-<hash>.json
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, ModelFileError
from octavo.base.fields import Fields
from octavo.base.files import replace_file
from octavo.cost.measured_steps import MeasuredSteps
from octavo.hub.store import home
from octavo.system import machine

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class CalibrationProfile:
    """A calibration.

    Args:
        about: what it holds for: the model's file and size, processor, instruction set,
            threads, types of activations and of the KV cache. A change of any of these takes
            another profile.
        engine: settings of the engine that was timed, for readers.
        measured_at: ISO 8601, UTC.
    """

    about: Mapping[str, Any]
    engine: Mapping[str, Any]
    steps: MeasuredSteps
    measured_at: str

    @property
    def file_name(self) -> str:
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", str(self.about.get("model", "model")))[:60]
        return f"{model}-{_hash(self.about)}.json"

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "about": dict(self.about),
            "engine": dict(self.engine),
            "measured_at": self.measured_at,
            "steps": self.steps.as_json(),
        }


def folder() -> Path:
    return home() / "calibrations"


def keep(profile: CalibrationProfile) -> Path:
    """Write a profile in the place of an older one, and return its path. ConfigError if it cannot
    be written."""
    path = folder() / profile.file_name
    try:
        replace_file(path, (json.dumps(profile.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def model_and_processor(path: Path) -> dict[str, Any]:
    """Return what a profile is found by before a model is loaded: its file or folder, and the
    processor of this machine."""
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    return {
        "model": path.name,
        "model_bytes": sum(each.stat().st_size for each in files),
        "processor": machine.cpu().model,
    }


def find(known: Mapping[str, Any]) -> CalibrationProfile | None:
    """Return the newest profile that agrees with all that is known; None if there is none.

    Files that are damaged, or of another version, are ignored.
    """
    found = []
    for path in folder().glob("*.json"):
        with suppress(ModelFileError):
            profile = read(path)
            if profile is not None and known.items() <= profile.about.items():
                found.append(profile)
    return max(found, key=lambda profile: profile.measured_at, default=None)


def read(path: Path) -> CalibrationProfile | None:
    """Read a profile from its file; None if it is of another version.

    Raises:
        ModelFileError: the file is damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"is no calibration: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return None
    fields = Fields(path, document)
    return CalibrationProfile(
        fields.table("about"),
        fields.table("engine"),
        MeasuredSteps.of_json(fields.section("steps")),
        fields.text("measured_at"),
    )


def _hash(about: Mapping[str, Any]) -> str:
    text = json.dumps(dict(about), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
