"""Some inputs of a quantized matrix: whole groups and superblocks, whose numbers stay as they are.

input_unit(weight)               inputs that share scales, which are never cut
columns_of(weight, columns)      the matrix [N, some of K]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight, Codes
from octavo.quantization.ggml_types import block_shape, row_bytes


def input_unit(weight: Weight) -> int:
    """Return how many consecutive inputs belong together, 1 where each stands by itself.

    Raises:
        UnsupportedModelError: groups are spread over all inputs.
    """
    if isinstance(weight, StoredWeight):
        return block_shape(weight.type)[0]
    assert isinstance(weight, CodedWeight), weight
    if weight.groups is not None:
        raise UnsupportedModelError(
            f"a matrix of {weight.format}, {list(weight.shape)}: its groups are spread over all "
            "inputs (act-order, g_idx), so that ranks cannot share these out; run it on one GPU, "
            "or quantize the model without act-order (desc_act=false)"
        )
    return 1 if weight.group_size >= weight.shape[1] else weight.group_size


def columns_of(weight: Weight, columns: range) -> Weight:
    """Return a matrix with some of its inputs: a copy, or codes that are unpacked when they are
    read.

    Args:
        columns: whole units, but for the last inputs of all.
    """
    num_rows, k = weight.shape
    start, stop, unit = columns.start, columns.stop, input_unit(weight)
    assert start % unit == 0 and (stop % unit == 0 or stop == k), (columns, unit)
    if isinstance(weight, StoredWeight):
        first, end = (row_bytes(weight.type, count) for count in (start, stop))
        data = np.ascontiguousarray(weight.data[:, first:end])
        return StoredWeight(weight.type, data, (num_rows, len(columns)))
    assert isinstance(weight, CodedWeight)
    groups = slice(start // weight.group_size, -(-stop // weight.group_size))
    zeros = weight.zeros
    return replace(
        weight,
        shape=(num_rows, len(columns)),
        codes=_Columns(weight.codes, slice(start, stop)),
        scales=_groups_of(weight.scales, groups),
        zeros=zeros if isinstance(zeros, float | int) else _groups_of(zeros, groups),
        nbytes=weight.nbytes * len(columns) // max(k, 1),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Some columns of codes."""

    codes: Codes
    columns: slice

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.codes.rows(start, stop)[:, self.columns]


def _groups_of(table: np.ndarray, groups: slice) -> np.ndarray:
    """Return the columns of some groups; one that all groups share stays."""
    return table if table.ndim < 2 or table.shape[1] == 1 else table[:, groups]
