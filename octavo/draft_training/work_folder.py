"""Intermediate results of a training, from which an interrupted run goes on.

The name of the folder has a hash of all that its files depend on (the model's files, the settings),
so that a run with others does not find them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.base.files import NewFile

_SUFFIX = ".octavo.resume"
_FORMAT = 2  # raised with the files' format, and when the same settings give another head
_DAMAGE = OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile


class WorkFolder:
    """Arrays on disk by name. ``about``: all that they depend on, as JSON."""

    def __init__(self, out: Path, about: Mapping[str, Any]):
        self._out = out.resolve()
        text = json.dumps({"format": _FORMAT, **about}, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._folder = self._out.with_name(f"{self._out.name}.{key}{_SUFFIX}")

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write or replace the arrays of a name. OSError if they cannot be written."""
        with NewFile(self._path(name)) as new:
            np.savez(new.file, allow_pickle=False, **arrays)
            new.publish()

    def load(self, name: str) -> dict[str, np.ndarray]:
        """Read the arrays of a name that was written. ModelFileError if they are damaged."""
        path = self._path(name)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        except _DAMAGE as error:
            raise ModelFileError(path, f"is damaged ({error}): remove it, and run again") from None

    def remove(self) -> None:
        """Remove all intermediate results for OUT, those of runs with other settings too."""
        for folder in self._out.parent.glob(f"{escape(self._out.name)}.*{_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"
