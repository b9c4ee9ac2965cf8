"""Codes that make up for each other's errors (GPTQ).

Of a linear with weight W [N, K] and inputs x, the expected squared error of the output for a row w
rounded to v is (w - v) H (w - v)^T / 2 with the Hessian H = 2 E[x x^T]. Columns are rounded one
after the other, and the error of each is taken back by those that are still free: with U the upper
triangular factor of H^-1 = U^T U, column i leaves e = (w_i - v_i) / U_ii, and every later column j
is moved by -e U_ij, which is what minimizes the error that remains.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323). Two things are decided otherwise than there:

- *Static act-order.* Columns are processed by descending H_ii, the most important ones while there
  are many left that can make up for them. Scales are those of the weights as they were, so groups
  are neighbours in natural order whatever the order of processing, and a file needs no ``g_idx``.
- *Scales are searched* by the importance H_ii of their columns (``grid.search_grid``), in place of
  those that hold the largest value: both together gain more than either alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.quantize.grid import (
    Grid,
    QuantizedMatrix,
    Scheme,
    decode,
    encode,
    full_grid,
    quantize_to_nearest,
    search_grid,
)

Order = Literal["activation", "natural"]

# Columns whose errors go to all after them in one product.
_BLOCK = 128

# What is added to the diagonal, as a part of its mean; ten times as much until there is a factor.
# A tenth leaves 1 to 7 % less squared error in a layer of SmolLM2 135M on other text, but the whole
# model's answers diverge more (0.123 against 0.117), so this is the usual hundredth.
_DAMPING = 0.01


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    order: Order = "activation",
    search: bool = True,
) -> QuantizedMatrix:
    """A matrix in the codes of ``scheme`` that change a linear's outputs least, as GPTQ finds them.

    Rows for which rounding to nearest would have changed outputs less are rounded to nearest: a
    greedy method promises nothing, and so no row is worse for it. Channels that no input ever used
    have no errors to give or take. They are rounded to nearest too, and not set to zero as is
    usual: a text that uses them may come later.

    Args:
        weight: float32 [N, K].
        hessian: 2 E[x x^T] of its inputs, float32 [K, K]; see ``observers.input_statistics``.
        order: ``"activation"`` is static act-order. ``"natural"`` goes from the first column to the
            last, and makes the grid of a group when its turn comes, of what its columns are then.
        search: grids are those of least weighted error, instead of those that hold all values.

    Raises:
        ConfigError: groups do not fill a row, or the Hessian has values that are not finite.
    """
    if not torch.isfinite(hessian).all():
        raise ConfigError(
            "the inputs of a linear are not finite on the calibration text: the model overflows, "
            "or its weights are damaged"
        )
    importance = hessian.diagonal() + _mean_damping(hessian) if search else None
    nearest = quantize_to_nearest(weight, scheme, search=search, importance=importance)
    natural = torch.arange(len(hessian))
    grids: _StaticGrids | _FreshGrids
    if order == "activation":
        places = hessian.diagonal().argsort(descending=True, stable=True)
        grids = _StaticGrids(nearest, places)
    elif isinstance(scheme.group_size, int):
        places, grids = natural, _FreshGrids(scheme, scheme.group_size, importance)
    else:  # one group, whose turn comes before anything was moved
        places, grids = natural, _StaticGrids(nearest, natural)
    factor = inverse_factor(hessian[places][:, places])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    columns = weight.t()[places].contiguous()
    codes[:, places] = _round_columns(columns, factor, grids, scheme).t()
    corrected = QuantizedMatrix(codes, *grids.all(), scheme)
    return _better_rows(weight, hessian, corrected, nearest)


def output_error(weight: Tensor, matrix: QuantizedMatrix, hessian: Tensor) -> Tensor:
    """(w - v) H (w - v)^T of each row: float32 [N], twice the mean squared error of an output."""
    error = weight - matrix.dequantize()
    return (error @ hessian).mul_(error).sum(dim=1)


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper triangular U [K, K] with U^T U the inverse of H, damped until it has one."""
    # Read backwards, the lower factor of a matrix is upper: H = V V^T, so H^-1 = V^-T V^-1 and U is
    # V^-1. The inverse of H itself, which rounding would spoil, is never formed.
    backwards = hessian.flip(0, 1)
    damping = _mean_damping(hessian)
    while True:
        damped = backwards + damping * torch.eye(len(hessian))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
        damping *= 10  # ends: with enough of it, H is the identity but for a factor
    return torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(len(hessian)), upper=True)


def _mean_damping(hessian: Tensor) -> float:
    return _DAMPING * (float(hessian.diagonal().mean()) or 1.0)


def _better_rows(
    weight: Tensor, hessian: Tensor, first: QuantizedMatrix, second: QuantizedMatrix
) -> QuantizedMatrix:
    """Of two matrices, for each row that of the one with the smaller error."""
    errors = [output_error(weight, matrix, hessian) for matrix in (first, second)]
    use_first = (errors[0] <= errors[1])[:, None]
    return QuantizedMatrix(
        torch.where(use_first, first.codes, second.codes),
        torch.where(use_first, first.scales, second.scales),
        torch.where(use_first, first.zeros, second.zeros),
        first.scheme,
    )


# -- columns, one after the other ------------------------------------------------------------------


class _StaticGrids:
    """The grids that a matrix has already, for columns in the order of ``places`` [K]."""

    block = _BLOCK

    def __init__(self, matrix: QuantizedMatrix, places: Tensor):
        width = len(places) // matrix.scales.shape[1]
        self._matrix = matrix
        self._scales, self._zeros = matrix.scales.t().contiguous(), matrix.zeros.t().contiguous()
        self._groups = (places // width).tolist()

    def of(self, index: int, columns: Tensor) -> Grid:
        """The grid [N] of the column that is at ``index`` in ``columns`` [K, N]."""
        group = self._groups[index]
        return Grid(self._scales[group], self._zeros[group])

    def all(self) -> Grid:
        """All grids, [N, G]."""
        return Grid(self._matrix.scales, self._matrix.zeros)


class _FreshGrids:
    """The same for columns in natural order, made when the first column of a group is asked for."""

    def __init__(self, scheme: Scheme, width: int, importance: Tensor | None):
        self._scheme, self._width, self._importance = scheme, width, importance
        self._made: list[Grid] = []
        self.block = width * max(1, _BLOCK // width)  # in whole groups, whose columns are all moved

    def of(self, index: int, columns: Tensor) -> Grid:
        if index % self._width == 0:
            group = slice(index, index + self._width)
            values = columns[group].t().contiguous()
            if self._importance is None:
                self._made.append(full_grid(values, self._scheme))
            else:
                self._made.append(search_grid(values, self._scheme, self._importance[group]))
        return self._made[-1]

    def all(self) -> Grid:
        return Grid(*(torch.stack(parts, dim=1) for parts in zip(*self._made, strict=True)))


def _round_columns(
    columns: Tensor, factor: Tensor, grids: _StaticGrids | _FreshGrids, scheme: Scheme
) -> Tensor:
    """Codes uint8 [K, N] of ``columns`` [K, N], which are overwritten; ``factor`` is U.

    Within a block, an error goes to the block's other columns at once. Those after it get the
    errors of a whole block in one product, as many memory accesses fewer.
    """
    codes = torch.empty(columns.shape, dtype=torch.uint8)
    for start in range(0, len(columns), grids.block):
        stop = min(start + grids.block, len(columns))
        errors = torch.empty_like(columns[start:stop])
        with _one_thread():
            for index in range(start, stop):
                column, grid = columns[index, :, None], grids.of(index, columns)
                code = encode(column, grid, scheme)
                error = (column - decode(code, grid, scheme))[:, 0] / factor[index, index]
                columns[index + 1 : stop].addr_(factor[index, index + 1 : stop], error, alpha=-1)
                codes[index], errors[index - start] = code[:, 0], error
        columns[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return codes


@contextmanager
def _one_thread() -> Iterator[None]:
    """A column is too little work to be shared out: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
