"""What a model's files hold for a weight, and what can be asked of it whatever its format is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

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

    def narrow(self, start: int, stop: int) -> Weight:
        """Rows ``start`` to ``stop`` of a matrix; no copy."""
        ...

    def floats(self) -> np.ndarray:
        """A copy in float32, of one that is not quantized."""
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

    def narrow(self, start: int, stop: int) -> StoredWeight:
        rows = self.data[start:stop]
        return StoredWeight(self.type, rows, (len(rows), *self.shape[1:]))

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
