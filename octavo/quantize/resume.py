"""Keeps finished matrices of a quantization on disk, so that an interrupted run can be continued.

Matrices are kept beside the model that is being made, a file each, until it is written. The name of
their folder has a hash of all they depend on (settings, text, the files of the source), so that a
run with others does not find them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from glob import escape
from pathlib import Path

import numpy as np
import torch

from octavo.base.errors import ModelFileError
from octavo.base.files import NewFile, sha256_of
from octavo.models.checkpoint import Checkpoint
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.methods import QuantizeRequest

_SUFFIX = ".octavo.resume"
_DAMAGE = OSError, EOFError, ValueError, KeyError, AssertionError, zipfile.BadZipFile
_PARTS = "codes", "scales", "zeros"
_FORMAT = 1  # raised with the files' format, and when the same settings give other matrices


class KeptMatrices(Mapping[str, QuantizedMatrix]):
    """The finished matrices of ``out`` on disk, by parameter, a byte for each weight.

    ``schemes``: those of all matrices of the model. Matrices are read when they are accessed.
    """

    def __init__(
        self,
        out: Path,
        checkpoint: Checkpoint,
        wanted: QuantizeRequest,
        schemes: Mapping[str, Scheme],
    ):
        self._out, self._schemes = out.resolve(), schemes
        key = _fingerprint(checkpoint, wanted, schemes)
        self._folder = self._out.with_name(f"{self._out.name}.{key}{_SUFFIX}")

    def keep(self, name: str, matrix: QuantizedMatrix) -> None:
        """Write a matrix, unless it is kept already. OSError if it cannot be written."""
        if name in self:
            return
        arrays = {part: getattr(matrix, part).numpy() for part in _PARTS}
        with NewFile(self._path(name)) as new:
            np.savez(new.file, allow_pickle=False, **arrays)
            new.publish()

    def remove(self) -> None:
        """Remove all matrices that are kept for ``out``, those of other settings too."""
        for folder in self._out.parent.glob(f"{escape(self._out.name)}.*{_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)

    def __getitem__(self, name: str) -> QuantizedMatrix:
        path = self._path(name)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                parts = {part: torch.from_numpy(arrays[part]) for part in _PARTS}
            return QuantizedMatrix(**parts, scheme=self._schemes[name])
        except FileNotFoundError:
            raise KeyError(name) from None
        except _DAMAGE as error:
            raise ModelFileError(path, f"is damaged ({error}): remove it, and run again") from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._path(name).exists()

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._schemes if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"


def _fingerprint(
    checkpoint: Checkpoint, wanted: QuantizeRequest, schemes: Mapping[str, Scheme]
) -> str:
    """A hash of all that matrices depend on; files of the source by their size and time."""
    settings = asdict(wanted)
    settings["calibration"] = wanted.calibration and sha256_of(wanted.calibration)
    files = [path.stat() for path in checkpoint.files]
    about = {
        "format": _FORMAT,
        "settings": settings,
        "schemes": {name: asdict(scheme) for name, scheme in schemes.items()},
        "source": str(checkpoint.path.resolve()),
        "files": [(stat.st_size, stat.st_mtime_ns) for stat in files],
    }
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
