"""Intermediate results of a quantization or a training, from which an interrupted run goes on.

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
from octavo.models.checkpoint import Checkpoint

_SUFFIX = ".octavo.resume"
_DAMAGE = OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile


class WorkFolder:
    """Arrays on disk by name, in a folder beside ``out``, which is removed once that is written.

    ``about``: all that they depend on beside the files of ``checkpoint``, as JSON; these by their
    sizes and times.
    """

    def __init__(self, out: Path, checkpoint: Checkpoint, about: Mapping[str, Any]):
        self._out = out.resolve()
        stats = [path.stat() for path in checkpoint.files]
        files = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        source = {"source": str(checkpoint.path.resolve()), "files": files}
        text = json.dumps({**about, **source}, sort_keys=True, default=str)
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
        try:
            with (
                self._path(name).open("rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                return {key: arrays[key] for key in arrays.files}
        except _DAMAGE as error:
            raise self.damaged(name, error) from None

    def damaged(self, name: str, why: Exception) -> ModelFileError:
        """Return the error of arrays that are not those that were kept."""
        return ModelFileError(self._path(name), f"is damaged ({why}): remove it, and run again")

    def remove(self) -> None:
        """Remove all intermediate results for ``out``, those of runs with other settings too."""
        for folder in self._out.parent.glob(f"{escape(self._out.name)}.*{_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"
