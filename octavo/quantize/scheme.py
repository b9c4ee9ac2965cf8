"""A quantization scheme, the bits, group size, zero points or code table of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.base.errors import ConfigError

GroupSize = int | Literal["channel", "tensor"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme of a matrix [N, K].

    Args:
        bits: bits of a code, 2 to 8.
        group_size: number of neighbours in a row that share a scale and a zero; ``"channel"`` is a
            whole row, ``"tensor"`` the whole matrix.
        symmetric: whether the zero is the middle code, 2^(b-1), in every group.
        float_minimum: for an asymmetric scheme: the value of code 0 is stored as float16, in place
            of an integer zero point, as in GGUF's Q4_1.
        table: the table that codes index, of ``quantization/levels.py``, without zeros; None for
            integers.

    Raises:
        ConfigError: a setting is out of range, or contradicts another.
    """

    bits: int
    group_size: GroupSize
    symmetric: bool = True
    float_minimum: bool = False
    table: Literal["e4m3", "e5m2", "nf4"] | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"bits must be 2 to 8, not {self.bits}")
        size = self.group_size
        if size not in ("channel", "tensor") and not (isinstance(size, int) and size > 0):
            raise ConfigError(
                f"group_size must be a positive number, 'channel' or 'tensor', not {size!r}"
            )
        if self.symmetric and self.float_minimum:
            raise ConfigError("a symmetric scheme has no minimum: set symmetric=False with it")
        if self.table is not None and not self.symmetric:
            raise ConfigError(f"codes of {self.table} have no zero points: leave symmetric=True")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric groups."""
        return 2 ** (self.bits - 1)

    def group_width(self, num_columns: int) -> int:
        """Number of columns of a group. ConfigError if groups do not fill ``num_columns``."""
        if not isinstance(self.group_size, int):
            return num_columns
        if num_columns % self.group_size:
            fitting = [size for size in (128, 64, 32, 16) if num_columns % size == 0]
            advice = " or ".join([*map(str, fitting), "'channel'"])
            raise ConfigError(
                f"rows of {num_columns} values cannot be cut into groups of {self.group_size}: "
                f"use a group_size of {advice}"
            )
        return self.group_size
