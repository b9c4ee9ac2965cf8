"""What a model's files hold for a weight: bytes, in the type that they have there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor as it is in its file, of any type.

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
    def is_quantized(self) -> bool:
        """Whether it is in blocks, and not in one of the FLOAT_TYPES."""
        return self.type not in FLOAT_TYPES

    def floats(self) -> np.ndarray:
        """A copy in float32, of one that is not quantized."""
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
