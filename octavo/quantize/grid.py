"""Quantization grids, the scales and zero points of groups, and rounding to nearest.

A matrix [N, K] is cut into groups of values that share a scale ``s`` and a zero ``z``; a value is
an integer code ``q`` of b bits, 0 <= q < 2^b::

    symmetric            w = s (q - 2^(b-1))
    asymmetric           w = s (q - z)            z an integer, 0 <= z < 2^b
    with float minimums  w = s q + z              z any float16

Scales, and zeros that are floats, are rounded to float16 *before* codes are computed, so that
errors are those of the values that a file holds.

Functions take ``values`` [..., L], whose last dimension is the group; see ``grouped``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantize.code_tables import LARGEST, TABLES, levels_of, nearest_levels
from octavo.quantize.scheme import Scheme

# The exponent of the error by which scales are searched without calibration text: between squares,
# which minimize the mean, and higher powers, which spare large values. It is the default of
# llm-compressor's ``mse`` observer.
ERROR_POWER = 2.4

# The parts of a range that the search tries. The widest exceeds it, since a symmetric grid falls
# half a step short of the largest value if that is positive.
_OF_BOTH_ENDS = torch.linspace(1.08, 0.40, 48).tolist()
# The same for ranges whose ends are independent: half as many for both ends, then for each end.
_OF_BOTH_FIRST, _OF_ONE_END = _OF_BOTH_ENDS[::2], torch.linspace(1.2, 0.6, 12).tolist()

# The smallest and the largest positive float16.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-24, 65504.0

# Values that a thread searches at a time. They stay in the cache, and are so few that PyTorch does
# not share them among threads of its own, which would wait for each other.
_CHUNK_VALUES = 1 << 15


class Grid(NamedTuple):
    """The scales and zeros of groups, float32 of the same shape, one entry for each group.

    ``scales``: positive, exact in float16 unless the scheme has a table. ``zeros``: integers, or
    the value of code 0, exact in float16 (see the module's docstring); 0 with a table.
    """

    scales: Tensor
    zeros: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix: ``codes`` uint8 [N, K]; ``scales``, ``zeros`` [N, G] as in ``Grid``.

    A row has G groups of K / G neighbours. With one group for a ``"tensor"``, all rows repeat it.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = columns // self.scheme.group_width(columns)
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        for each in (self.scales, self.zeros):
            assert each.dtype == torch.float32 and each.shape == (rows, groups), each.shape

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        rows, groups = self.scales.shape
        grid = Grid(self.scales, self.zeros)
        return decode(self.codes.view(rows, groups, -1).float(), grid, self.scheme).view(self.shape)

    def coded(self, format: str) -> CodedWeight:
        """Return the matrix as a weight of a checkpoint's ``format``: codes of a table, or integers
        with integer zeros."""
        assert not self.scheme.float_minimum, "zeros are integers"
        table = self.scheme.table
        return CodedWeight(
            format,
            self.shape,
            self.scheme.bits,
            self.scheme.group_width(self.shape[1]),
            PlainCodes(self.codes.numpy()),
            self.scales.numpy(),
            self.zeros.numpy() if table is None else 0.0,
            self.codes.numel() * self.scheme.bits // 8,
            None if table is None else TABLES[table],
        )


# -- rounding -------------------------------------------------------------------------------------


def quantize_to_nearest(
    weight: Tensor, scheme: Scheme, *, search: bool = False, importance: Tensor | None = None
) -> QuantizedMatrix:
    """Round each value of a matrix, float32 [N, K], to the nearest of its group's grid.

    ``search``: use the grids of ``search_grid``, by ``importance``, in place of ``full_grid``.

    Raises:
        ConfigError: groups do not fill a row.
    """
    values = grouped(weight, scheme)
    grid = (
        search_grid(values, scheme, grouped_importance(importance, weight, scheme))
        if search
        else full_grid(values, scheme)
    )
    return matrix_on_grid(weight, grid, scheme)


def matrix_on_grid(weight: Tensor, grid: Grid, scheme: Scheme) -> QuantizedMatrix:
    """Round a matrix [N, K] to nearest on a grid of its groups."""
    codes = encode(grouped(weight, scheme), grid, scheme).to(torch.uint8).view(weight.shape)
    rows = weight.shape[0]
    scales, zeros = (each.expand(rows, -1).contiguous() for each in grid)
    return QuantizedMatrix(codes, scales, zeros, scheme)


def grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """Reshape a matrix [N, K] to its groups: [N, G, L], or [1, 1, N * K] if it is a single one."""
    rows, columns = weight.shape
    width = scheme.group_width(columns)
    if scheme.group_size == "tensor":
        return weight.reshape(1, 1, -1)
    return weight.reshape(rows, columns // width, width)


def grouped_importance(importance: Tensor | None, weight: Tensor, scheme: Scheme) -> Tensor | None:
    """Reshape the importance of input channels [K] so that it broadcasts with ``grouped``."""
    if importance is None:
        return None
    if scheme.group_size == "tensor":
        return importance.repeat(weight.shape[0]).view(1, 1, -1)
    return importance.view(-1, scheme.group_width(weight.shape[1]))


def encode(values: Tensor, grid: Grid, scheme: Scheme) -> Tensor:
    """The nearest codes, as float32 [..., L]; halves go to the even one."""
    if scheme.table is not None:
        return nearest_levels(values / grid.scales.unsqueeze(-1), scheme.table)
    scales, zeros = (each.unsqueeze(-1) for each in grid)
    is_float = scheme.float_minimum
    codes = (values - zeros).div_(scales) if is_float else (values / scales).add_(zeros)
    return codes.round_().clamp_(0, scheme.max_code)


def decode(codes: Tensor, grid: Grid, scheme: Scheme) -> Tensor:
    """The values of codes, both float32 [..., L]."""
    if scheme.table is not None:
        return levels_of(codes, scheme.table).mul_(grid.scales.unsqueeze(-1))
    scales, zeros = (each.unsqueeze(-1) for each in grid)
    return codes * scales + zeros if scheme.float_minimum else (codes - zeros).mul_(scales)


# -- scales ---------------------------------------------------------------------------------------


def full_grid(values: Tensor, scheme: Scheme) -> Grid:
    """The grid [...] that holds all values [..., L] of a group, and zero.

    Symmetric: s = max|w| / ((2^b - 1) / 2), which uses the additional negative code, as
    compressed-tensors does. With a table: s = max|w| / its largest entry. Asymmetric, with
    low = min(0, min w) and high = max(0, max w): s = (high - low) / (2^b - 1), z = round(-low / s).
    With float minimums, as in Q4_1, z = min w and s = (max w - min w) / (2^b - 1), and zero need
    not be among the values.
    """
    return _grid_of_range(*_range(values, scheme), scheme)


def search_grid(values: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Grid:
    """The grid [...] of least error among those of 49 ranges, wider and narrower than the values.

    The error of a group is sum |e|^2.4 over its values, or sum i e^2 with an ``importance`` i. With
    E[x^2] of the input channels that is the expected squared error of the output, if channels are
    uncorrelated. ``importance`` broadcasts with [..., L] and is not negative.
    """
    step = max(1, _CHUNK_VALUES // math.prod(values.shape[1:]))
    parts = values.split(step)
    if len(parts) == 1:
        return _search(values, scheme, importance)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        grids = list(pool.map(lambda part: _search(part, scheme, importance), parts))
    return Grid(*(torch.cat(each) for each in zip(*grids, strict=True)))


def _search(values: Tensor, scheme: Scheme, importance: Tensor | None) -> Grid:
    best = _BestRange(values, scheme, importance)
    if scheme.symmetric:
        best.scan(_OF_BOTH_ENDS, _OF_BOTH_ENDS)
    else:
        best.scan(_OF_BOTH_FIRST, _OF_BOTH_FIRST)
        best.scan(_OF_ONE_END, repeat(1.0))
        best.scan(repeat(1.0), _OF_ONE_END)
    return best.grid


class _BestRange:
    """The range [...] of least error so far, initially that of all values."""

    def __init__(self, values: Tensor, scheme: Scheme, importance: Tensor | None):
        self._values, self._scheme, self._importance = values, scheme, importance
        self._low, self._high = _range(values, scheme)
        # A range that need not include zero shrinks around its own middle.
        self._middle = (self._low + self._high) / 2 if scheme.float_minimum else 0.0
        self.grid = _grid_of_range(self._low, self._high, scheme)
        self._error = _error(values, self.grid, scheme, importance)

    def scan(self, low_parts: Iterable[float], high_parts: Iterable[float]) -> None:
        """Try parts of the range that is the best at the start; the shorter list ends the scan."""
        below, above = self._low - self._middle, self._high - self._middle
        for low_part, high_part in zip(low_parts, high_parts, strict=False):
            self._try(self._middle + below * low_part, self._middle + above * high_part)

    def _try(self, low: Tensor, high: Tensor) -> None:
        grid = _grid_of_range(low, high, self._scheme)
        error = _error(self._values, grid, self._scheme, self._importance)
        is_better = error < self._error
        self._error = torch.where(is_better, error, self._error)
        self._low = torch.where(is_better, low, self._low)
        self._high = torch.where(is_better, high, self._high)
        scales, zeros = self.grid
        self.grid = Grid(
            torch.where(is_better, grid.scales, scales), torch.where(is_better, grid.zeros, zeros)
        )


def _error(values: Tensor, grid: Grid, scheme: Scheme, importance: Tensor | None) -> Tensor:
    error = decode(encode(values, grid, scheme), grid, scheme).sub_(values)
    if importance is None:
        return error.abs_().pow_(ERROR_POWER).sum(dim=-1)
    return error.square_().mul_(importance).sum(dim=-1)


def _range(values: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The ends of a group's range [...], which includes zero unless the scheme has minimums."""
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    return (low, high) if scheme.float_minimum else (low.clamp(max=0), high.clamp(min=0))


def _grid_of_range(low: Tensor, high: Tensor, scheme: Scheme) -> Grid:
    if scheme.table is not None:  # in files these scales are float32
        scales = torch.maximum(-low, high).div_(LARGEST[scheme.table]).clamp_(min=_LEAST_SCALE)
        return Grid(scales, torch.zeros_like(scales))
    if scheme.symmetric:
        scales = as_scales(torch.maximum(-low, high) / (scheme.max_code / 2))
        return Grid(scales, torch.full_like(scales, scheme.middle))
    scales = as_scales((high - low) / scheme.max_code)
    if scheme.float_minimum:
        return Grid(scales, low.half().float())
    return Grid(scales, (-low / scales).round_().clamp_(0, scheme.max_code))


def as_scales(scales: Tensor) -> Tensor:
    """Round scales to positive float16 values: a group of zeros has a positive scale too."""
    return scales.half().float().clamp_(_LEAST_SCALE, _LARGEST_SCALE)
