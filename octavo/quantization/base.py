"""Weights as a model's files store them, and the operations that every format supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.optional_deps import need_torch
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, row_bytes


class Weight(Protocol):
    """A tensor as its files store it.

    ``to_torch`` (tensors.py) converts it for the reference ops, ``packing.py`` for the native
    kernels.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        ...

    @property
    def format(self) -> str:
        """Name of the format for messages: "Q4_K", "gptq"."""
        ...

    @property
    def is_quantized(self) -> bool: ...

    @property
    def mapped(self) -> Sequence[np.ndarray]:
        """Parts of mapped files that hold these rows and no others."""
        ...

    def narrow(self, start: int, stop: int | None, step: int = 1) -> Weight:
        """Rows ``start`` to ``stop`` of a matrix, or values of a vector.

        Copies nothing, unless rows are skipped and the weight is not quantized.
        """
        ...

    def select(self, rows: np.ndarray) -> Weight:
        """The given rows, or values, in their order."""
        ...

    def floats(self) -> np.ndarray:
        """A copy of an unquantized weight in float32."""
        ...

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` of a matrix as float32 [rows, K].

        Raises:
            MissingPackageError: PyTorch is needed and not installed.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A tensor in one of GGUF's types, floats included.

    ``data`` is uint8 [rows, bytes of a row], a read-only view of the mapped file, and takes no
    memory of its own. It holds bytes since numpy has no bfloat16, and only kernels read blocks.
    """

    type: GGMLType
    data: np.ndarray
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        num_values = self.shape[-1] if self.shape else 1
        expected = prod(self.shape[:-1]), row_bytes(self.type, num_values)
        assert self.data.dtype == np.uint8, self.data.dtype
        assert self.data.shape == expected, (self.data.shape, self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def format(self) -> str:
        return self.type.name

    @property
    def is_quantized(self) -> bool:
        """True if the values are in blocks, false for FLOAT_TYPES."""
        return self.type not in FLOAT_TYPES

    @property
    def mapped(self) -> Sequence[np.ndarray]:
        return (self.data,)

    def narrow(self, start: int, stop: int | None, step: int = 1) -> StoredWeight:
        rows = self._rows()[start:stop:step]
        return self._of_rows(rows if step == 1 else np.ascontiguousarray(rows))

    def select(self, rows: np.ndarray) -> StoredWeight:
        return self._of_rows(self._rows()[rows])

    def _rows(self) -> np.ndarray:
        """The rows of a matrix; of a vector, a row for each value."""
        return self.data if len(self.shape) > 1 else self.data.reshape(self.shape[0], -1)

    def _of_rows(self, rows: np.ndarray) -> StoredWeight:
        data = rows if len(self.shape) > 1 else rows.reshape(1, -1)
        return StoredWeight(self.type, data, (len(rows), *self.shape[1:]))

    def floats(self) -> np.ndarray:
        raw = self.data.tobytes()
        match self.type:
            case GGMLType.F32:
                values = np.frombuffer(raw, "<f4")
            case GGMLType.F16:
                values = np.frombuffer(raw, "<f2")
            case GGMLType.BF16:  # the upper half of a float32
                values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            case _:
                raise AssertionError(f"{self.type.name} is quantized")
        return values.astype(np.float32).reshape(self.shape)

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        rows = self.narrow(start, stop)
        if not self.is_quantized:
            return rows.floats()
        need_torch("reading quantized weights as floats")
        from torch import from_numpy

        from octavo.quantization.gguf_formats import dequantize

        return dequantize(self.type, from_numpy(rows.data.copy())).numpy()


def stored_floats(values: np.ndarray) -> StoredWeight:
    """Wrap numbers as a float32 weight."""
    rows = values.astype(np.float32).reshape(-1, values.shape[-1])
    return StoredWeight(GGMLType.F32, float_bytes(rows, GGMLType.F32), values.shape)


def transposed(weight: Weight) -> StoredWeight:
    """Return a transposed copy of an unquantized matrix.

    Raises:
        UnsupportedModelError: the weight is quantized, or is not a matrix.
    """
    if not isinstance(weight, StoredWeight) or weight.is_quantized or len(weight.shape) != 2:
        raise UnsupportedModelError(
            f"a matrix of {weight.format}, {list(weight.shape)}, is stored as [inputs, outputs]: "
            "only unquantized ones can be transposed"
        )
    rows, columns = weight.shape
    size = row_bytes(weight.type, 1)
    data = weight.data.reshape(rows, columns, size).swapaxes(0, 1).reshape(columns, rows * size)
    return StoredWeight(weight.type, data, (columns, rows))


def entry_of(weight: Weight, index: int, count: int) -> Weight:
    """One of ``count`` matrices, or vectors, that a tensor stacks in its first dimension or its
    rows, without a copy.

    Raises:
        ValueError: the tensor does not hold ``count`` of them.
    """
    dims = len(weight.shape)
    if weight.shape[0] != count and (dims != 2 or weight.shape[0] % count):
        raise ValueError(f"the shape is {list(weight.shape)}, for {count} experts")
    if not isinstance(weight, StoredWeight):  # codes, whose rows are all stacked
        size = weight.shape[0] // count
        return weight.narrow(index * size, (index + 1) * size)
    size = len(weight.data) // count
    data = weight.data[index * size : (index + 1) * size]
    return StoredWeight(weight.type, data, weight.shape[1:])


def float_bytes(values: np.ndarray, type: GGMLType) -> np.ndarray:
    """Convert float32 [..., K] to uint8 [..., bytes of a row] of one of the FLOAT_TYPES.

    Rounds to nearest even; values beyond the range of float16 become infinite.
    """
    assert values.dtype == np.float32, values.dtype
    match type:
        case GGMLType.F32:
            rounded = values.astype("<f4")
        case GGMLType.F16:
            with np.errstate(over="ignore"):
                rounded = values.astype("<f2")
        case GGMLType.BF16:
            rounded = _bfloat16_bits(values)
        case _:
            raise AssertionError(f"{type.name} is quantized")
    return np.ascontiguousarray(rounded).view(np.uint8)


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Half a unit of the last kept place, minus one where that place is even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # The addition would carry a NaN's mantissa into its sign; a quiet NaN stays one.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
