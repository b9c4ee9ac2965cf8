"""How codes stand for the values of a matrix: bits, groups, zeros, or tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.base.errors import ConfigError

GroupSize = int | Literal["channel", "tensor"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [N, K] is stored: bits of a code, which values share a scale, and which zeros.

    Args:
        bits: 2 to 8.
        group_size: how many neighbours of a row share a scale and a zero; ``"channel"`` is a whole
            row, ``"tensor"`` the whole matrix.
        symmetric: the zero is the middle code, 2^(b-1), in every group.
        float_minimum: of one that is not symmetric: the value of code 0 is stored as float16, in
            place of an integer zero point, as in GGUF's Q4_1.
        table: the codes are looked up there, as in ``quantization/levels.py``, and there are no
            zeros; None for integers.

    Raises ConfigError for settings out of range, or that contradict each other.
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
            raise ConfigError(f"codes of {self.table} have no zeros: leave symmetric=True")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero of symmetric groups."""
        return 2 ** (self.bits - 1)

    def group_width(self, num_columns: int) -> int:
        """Columns of a group. ConfigError if groups do not fill a row of ``num_columns``."""
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
