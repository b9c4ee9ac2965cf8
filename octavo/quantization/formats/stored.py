"""Interface of weight formats, and the stored tensors that they assemble weights from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.quantization.base import Weight
from octavo.quantization.levels import E4M3, E5M2, E8M0

# safetensors' dtypes that numpy has.
_NUMPY = {"U8": "<u1", "I8": "<i1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4"}
# Floats of one byte, as lookup tables.
FLOAT8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
_TABLES = {**FLOAT8, "F8_E8M0": E8M0}
FLOATS = ("F32", "F16", "BF16")


class WeightFormat(Protocol):
    """The tensors in which a quantization method stores a weight, and their meaning."""

    @property
    def name(self) -> str:
        """Name of the method in ``quant_method``."""
        ...

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        """The weight that a tensor is a part of, and the part: ``model.q_proj.qweight`` is
        ("model.q_proj.weight", "qweight"). None for a tensor that is a weight itself."""
        ...

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> Weight:
        """Assemble the weight ``name`` from its parts.

        Raises:
            ModelFileError: parts do not fit each other; names the file and the tensor.
            UnsupportedModelError: octavo cannot read them.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor as its file stores it. ``dtype`` is its name in safetensors, ``data`` its bytes:
    contiguous uint8 of any shape."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    path: Path
    name: str

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def bytes(self) -> np.ndarray:
        """The bytes: uint8 [nbytes]."""
        return self.data.reshape(-1)

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(self.path, reason, field=self.name)

    def of(self, *dtypes: str, dims: int | None = None) -> StoredTensor:
        """Return the tensor itself; ModelFileError unless it has one of these dtypes, this many
        dimensions, and values."""
        if self.dtype not in dtypes:
            raise self.error(f"the type is {self.dtype}, not {' or '.join(dtypes)}")
        if dims is not None and len(self.shape) != dims:
            raise self.error(f"the shape is {list(self.shape)}, not of {dims} dimensions")
        if not self.nbytes:
            raise self.error(f"the shape is {list(self.shape)}: it is empty")
        return self

    def shaped(self, *shape: int) -> StoredTensor:
        """Return the tensor itself; ModelFileError unless it has this shape."""
        if self.shape != shape:
            raise self.error(f"the shape is {list(self.shape)}, not {list(shape)}")
        return self

    def array(self) -> np.ndarray:
        """The numbers as a view of the file, for dtypes that numpy has."""
        return self.bytes.view(_NUMPY[self.dtype]).reshape(self.shape)

    def words(self) -> np.ndarray:
        """I32 as uint32, for packed bit fields: a view of the file."""
        return self.bytes.view("<u4").reshape(self.shape)

    def floats(self) -> np.ndarray:
        """The numbers as float32: a copy."""
        if self.dtype in _TABLES:
            return _TABLES[self.dtype][self.bytes].reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            bits = self.bytes.view("<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        return self.array().astype(np.float32)


class Parts:
    """The tensors of one weight, by their names in its format."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]):
        self.name = name
        self._tensors = tensors

    def __contains__(self, part: str) -> bool:
        return part in self._tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def find(self, part: str) -> StoredTensor | None:
        return self._tensors.get(part)

    def need(self, part: str, *dtypes: str, dims: int | None = None) -> StoredTensor:
        """A part that must exist; see ``StoredTensor.of``."""
        if part not in self._tensors:
            raise self.error(f"its {part} is missing")
        return self._tensors[part].of(*dtypes, dims=dims)

    def error(self, reason: str) -> ModelFileError:
        """An error of the weight as a whole, in the file of its first tensor."""
        first = next(iter(self._tensors.values()))
        return ModelFileError(first.path, reason, field=self.name)
