"""Reads a folder of trained draft heads, ``config.json`` and ``model.safetensors``.

    folder = HeadFolder(path)
    folder.architecture             which kind of heads these are
    folder.load(module)             every parameter gets its tensor, and none is left over
    folder.token_ids("token_map")   the shortlist of a head, checked

The files are untrusted: whatever is wrong with them is a ModelFileError that names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder
from octavo.layers.module import Module, named_parameters
from octavo.layers.parameter import Parameter, ShapeMismatch
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import ModelConfig
from octavo.models.safetensors import SafetensorsFile
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import FLOAT_TYPES

_FLOATS = {type.name: type for type in FLOAT_TYPES}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}


class Tensors:
    """Tensors by name, which parameters are filled with."""

    def __init__(self, path: Path):
        self._path = path  # named in errors

    def weight(self, name: str) -> Weight:
        """Return a tensor. ModelFileError if there is none of that name."""
        raise NotImplementedError

    def fill(self, parameter: Parameter, name: str) -> None:
        """Load a parameter with the tensor ``name``. ModelFileError if its shape is another."""
        try:
            parameter.load(self.weight(name))
        except ShapeMismatch as error:
            raise ModelFileError(self._path, f"{error}", field=name) from None

    def matrix(self, name: str, rows: int, columns: int) -> StoredWeight:
        """Return a float tensor of this shape. Raises a ModelError for any other."""
        weight = self.weight(name)
        if weight.shape != (rows, columns):
            reason = f"the shape is {list(weight.shape)}, not {[rows, columns]}"
            raise ModelFileError(self._path, reason, field=name)
        if weight.is_quantized or not isinstance(weight, StoredWeight):
            raise UnsupportedModelError(
                f"{self._path} ({name}): is quantized ({weight.format}), and must be a matrix of "
                "floats to be cut in two: take the unquantized checkpoint"
            )
        return weight


class CheckpointTensors(Tensors):
    """The tensors of a model's checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint.path)
        self._checkpoint = checkpoint

    def weight(self, name: str) -> Weight:
        if name not in self._checkpoint.tensors:
            raise ModelFileError(self._path, "the tensor is missing", field=name)
        return self._checkpoint.read(name)


class HeadFolder(Tensors):
    """The tensors and config of a folder of heads.

    Raises:
        ModelFileError: a file is missing or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        folder = ModelFolder(path)
        config = folder.read_json("config.json")
        if config is None:
            raise ModelFileError(path, "the folder has no config.json, so there are no heads in it")
        self.config = Fields(path / "config.json", config)
        weights = folder.find("model.safetensors")
        if weights is None:
            raise ModelFileError(
                path, "the folder has no model.safetensors; heads in other files are not read"
            )
        self._file = SafetensorsFile(weights)
        super().__init__(weights)
        self._used: set[str] = set()

    @property
    def architecture(self) -> str:
        names = self.config.entries("architectures", 1)
        return str(names[0])

    @property
    def tensors(self) -> Collection[str]:
        return self._file.tensors.keys()

    def check(self, expected: Collection[str], method: str) -> None:
        """Raise a ConfigError unless these are heads of one of the ``expected`` architectures."""
        if self.architecture not in expected:
            raise ConfigError(
                f"speculative_config: method {method} serves {' and '.join(expected)}, and "
                f"{self.path} has a {self.architecture}"
            )

    def check_fits(self, field: str, size: int, target: ModelConfig) -> None:
        """Raise a ConfigError if ``hidden_size`` or ``vocab_size`` is not that of the model."""
        wanted = getattr(target, field)
        if size != wanted:
            raise ConfigError(
                f"speculative_config: the heads in {self.path} have a {field} of {size}, and "
                f"{target.name} one of {wanted}: give heads that were trained for this model"
            )

    def load(
        self, module: Module, name_of: Callable[[str], str] = str, ignored: Collection[str] = ()
    ) -> None:
        """Load every parameter of ``module`` that has no value yet.

        ``name_of`` gives the tensor's name for a parameter's. A tensor that was not read is a
        ModelFileError, unless it is one of the ``ignored``.
        """
        for name, parameter in named_parameters(module):
            if not parameter.is_loaded:
                self.fill(parameter, name_of(name))
        left = sorted(set(self.tensors) - self._used - set(ignored))
        if left:
            raise ModelFileError(
                self._path, f"has tensors that no such head has: {', '.join(left[:5])}"
            )

    def weight(self, name: str) -> StoredWeight:
        """Return a tensor of floats, which counts as read."""
        dtype, shape = self._take(name)
        if dtype not in _FLOATS:
            raise ModelFileError(self._path, f"{dtype} is none of {', '.join(_FLOATS)}", field=name)
        return StoredWeight(_FLOATS[dtype], self._file.data(name), shape)

    def integers(self, name: str) -> np.ndarray:
        """Return a vector of integers, int64."""
        dtype, shape = self._take(name)
        if dtype not in _INTEGERS or len(shape) != 1:
            raise ModelFileError(
                self._path, f"{dtype} {list(shape)} is no list of whole numbers", field=name
            )
        return np.frombuffer(self._file.data(name).tobytes(), _INTEGERS[dtype]).astype(np.int64)

    def token_ids(
        self, name: str, count: int, vocab_size: int, *, offsets: bool = False
    ) -> np.ndarray:
        """The target's token id of each row of a head, int64 [count].

        ``offsets``: the tensor holds the ids less the number of their row.
        """
        ids = self.integers(name)
        if offsets:
            ids = ids + np.arange(len(ids))
        if len(ids) != count or len(np.unique(ids)) != count:
            raise ModelFileError(
                self._path, f"has {len(ids)} tokens for {count} rows, or one twice", field=name
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ModelFileError(
                self._path, f"a token is outside of a vocabulary of {vocab_size}", field=name
            )
        return ids

    def _take(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._file.tensors:
            raise ModelFileError(self._path, "the tensor is missing", field=name)
        self._used.add(name)
        return self._file.tensors[name]
