"""What a model's files hold for a weight, and what can be asked of it whatever its format is."""

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
    """A tensor as its files have it. Reading it is left to those who compute: ``to_torch``
    (tensors.py) makes what the reference ops take, ``packing.py`` what the native kernels read.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """In the files."""
        ...

    @property
    def format(self) -> str:
        """What people call it: "Q4_K", "gptq"."""
        ...

    @property
    def is_quantized(self) -> bool: ...

    @property
    def mapped(self) -> Sequence[np.ndarray]:
        """Memory of files that these rows alone are in."""
        ...

    def narrow(self, start: int, stop: int | None, step: int = 1) -> Weight:
        """Rows ``start`` to ``stop`` of a matrix, or values of a vector; no copy, unless some are
        stepped over and it is not quantized."""
        ...

    def select(self, rows: np.ndarray) -> Weight:
        """The given rows, or values, in their order."""
        ...

    def floats(self) -> np.ndarray:
        """A copy in float32, of one that is not quantized."""
        ...

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` of a matrix as float32 [rows, K]. MissingPackageError where
        that takes PyTorch, and it is not there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A tensor as it is in its file, of a type of GGUF's, floats included.

    ``data`` is uint8 [rows, bytes of a row], a view of the mapped file: it takes no memory of its
    own, and must not be written to. Bytes and not numbers, since numpy has no bfloat16, and nobody
    but a kernel has blocks.
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
        """Whether it is in blocks, and not in one of the FLOAT_TYPES."""
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
        """Of a vector, a row for each value."""
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
    """Numbers as a tensor of float32."""
    rows = values.astype(np.float32).reshape(-1, values.shape[-1])
    return StoredWeight(GGMLType.F32, float_bytes(rows, GGMLType.F32), values.shape)


def transposed(weight: Weight) -> StoredWeight:
    """A copy of a matrix of floats with its rows as columns. UnsupportedModelError of another."""
    if not isinstance(weight, StoredWeight) or weight.is_quantized or len(weight.shape) != 2:
        raise UnsupportedModelError(
            f"a matrix of {weight.format}, {list(weight.shape)}, stands as [inputs, outputs]: only "
            "floats can be turned"
        )
    rows, columns = weight.shape
    size = row_bytes(weight.type, 1)
    data = weight.data.reshape(rows, columns, size).swapaxes(0, 1).reshape(columns, rows * size)
    return StoredWeight(weight.type, data, (columns, rows))


def entry_of(weight: Weight, index: int, count: int) -> Weight:
    """One of the ``count`` matrices, or vectors, that lie in a tensor one behind the other: of its
    first dimension, or of its rows. ValueError if it does not have so many; no copy."""
    dims = len(weight.shape)
    if weight.shape[0] != count and (dims != 2 or weight.shape[0] % count):
        raise ValueError(f"the shape is {list(weight.shape)}, for {count} experts")
    if not isinstance(weight, StoredWeight):  # whose rows are all one below the other
        size = weight.shape[0] // count
        return weight.narrow(index * size, (index + 1) * size)
    size = len(weight.data) // count
    data = weight.data[index * size : (index + 1) * size]
    return StoredWeight(weight.type, data, weight.shape[1:])


def float_bytes(values: np.ndarray, type: GGMLType) -> np.ndarray:
    """float32 [..., K] as uint8 [..., bytes of a row] of one of the FLOAT_TYPES.

    Rounded to the nearest, a tie to the even one; what is too large for float16 becomes infinite.
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
    # Half a unit of the last place that stays, less one where that place is even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # The addition would carry a NaN's mantissa into its sign; a quiet NaN stays one.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
