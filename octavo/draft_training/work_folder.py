"""What a run of training has done, beside OUT until that is there: an ended run goes on from it.

The name of the folder says what its files depend on (the model's files, the settings), so that a
run with anything else does not find them.
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
_FORMAT = 2  # of the files; and whenever the same settings begin to give another head
_DAMAGE = OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile


class WorkFolder:
    """Arrays by name. ``about``: all that they depend on, as JSON."""

    def __init__(self, out: Path, about: Mapping[str, Any]):
        self._out = out.resolve()
        text = json.dumps({"format": _FORMAT, **about}, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._folder = self._out.with_name(f"{self._out.name}.{key}{_SUFFIX}")

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write arrays, in place of those of that name. OSError if there is no room."""
        with NewFile(self._path(name)) as new:
            np.savez(new.file, allow_pickle=False, **arrays)
            new.publish()

    def load(self, name: str) -> dict[str, np.ndarray]:
        """Those of a name, which are there. ModelFileError if they are damaged."""
        path = self._path(name)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        except _DAMAGE as error:
            raise ModelFileError(path, f"is damaged ({error}): remove it, and run again") from None

    def remove(self) -> None:
        """All that is kept for OUT, also by runs with other settings: it is there now."""
        for folder in self._out.parent.glob(f"{escape(self._out.name)}.*{_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"
