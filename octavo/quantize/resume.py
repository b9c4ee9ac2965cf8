"""Keeps finished matrices of a quantization on disk, so that an interrupted run can be continued.

Matrices are kept beside the model that is being made, a file each, until it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from octavo.base.files import sha256_of
from octavo.models.checkpoint import Checkpoint
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.work_folder import WorkFolder

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
        self._schemes = schemes
        self._work = WorkFolder(out, checkpoint, _about(wanted, schemes))

    def keep(self, name: str, matrix: QuantizedMatrix) -> None:
        """Write a matrix, unless it is kept already. OSError if it cannot be written."""
        if name not in self:
            self._work.keep(name, {part: getattr(matrix, part).numpy() for part in _PARTS})

    def remove(self) -> None:
        """Remove all matrices that are kept for ``out``, those of other settings too."""
        self._work.remove()

    def __getitem__(self, name: str) -> QuantizedMatrix:
        if name not in self:
            raise KeyError(name)
        arrays = self._work.load(name)
        try:
            parts = {part: torch.from_numpy(arrays[part]) for part in _PARTS}
            return QuantizedMatrix(**parts, scheme=self._schemes[name])
        except (KeyError, ValueError, AssertionError) as error:
            raise self._work.damaged(name, error) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._work

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._schemes if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _about(wanted: QuantizeRequest, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """Return all that matrices depend on, beside the model."""
    settings = asdict(wanted)
    settings["calibration"] = wanted.calibration and sha256_of(wanted.calibration)
    return {
        "format": _FORMAT,
        "settings": settings,
        "schemes": {name: asdict(scheme) for name, scheme in schemes.items()},
    }
