"""Weights as torch tensors, for ops that compute when they are called.

``to_torch`` has one function for each kind of weight; the ops know only whether a matrix is a plain
tensor or has to be dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantization.gguf_formats import FLOAT_DTYPES, dequantize
from octavo.quantization.upload import Upload, upload_at_once


class QuantizedTensor(Protocol):
    """A matrix of N rows and K columns that has to be dequantized."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...

    def dequantize(
        self, start: int = 0, stop: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Rows ``start`` to ``stop`` as float32 [rows, K], in ``out`` if it is given."""
        ...

    def select(self, rows: Tensor) -> Tensor:
        """The given rows (int64 [R]) as float32 [R, K]."""
        ...


WeightTensor: TypeAlias = Tensor | QuantizedTensor
"""A matrix for the ops ``embed``, ``linear`` and ``lm_head``: both have shape and nbytes."""


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix in a GGUF format; ``data`` is uint8 [N, bytes of a row]."""

    type: GGMLType
    data: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        assert self.data.dtype == torch.uint8, self.data.dtype
        assert self.data.shape == (rows, row_bytes(self.type, columns)), (self.data.shape, self)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(
        self, start: int = 0, stop: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        return dequantize(self.type, self.data[start:stop], out)

    def select(self, rows: Tensor) -> Tensor:
        return dequantize(self.type, self.data.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A ``CodedWeight`` on a device, with the fields of that class.

    ``codes(start, stop)`` returns the codes of some rows, uint8 [rows, K].
    """

    codes: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor
    levels: Tensor | None
    groups: Tensor  # int64 [K]
    shape: tuple[int, int]
    nbytes: int

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def dequantize(
        self, start: int = 0, stop: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        if out is None:
            out = torch.empty((stop - start, self.shape[1]), device=self.device)
        codes = self.codes(start, stop)
        out.copy_(codes if self.levels is None else self.levels[codes.int()])
        out.sub_(self._by_input(self.zeros, start, stop))
        return out.mul_(self._by_input(self.scales, start, stop))

    def select(self, rows: Tensor) -> Tensor:
        each = [self.dequantize(row, row + 1) for row in rows.tolist()]
        return torch.cat(each) if each else self.scales.new_empty((0, self.shape[1]))

    def _by_input(self, table: Tensor, start: int, stop: int) -> Tensor:
        table = table if table.shape[0] == 1 else table[start:stop]
        return table if table.shape[1] == 1 else table.index_select(1, self.groups)


@singledispatch
def to_torch(
    weight: Weight,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    upload: Upload | None = None,
) -> WeightTensor:
    """Move a weight to a device.

    On the CPU the tensor shares the weight's memory, so that a mapped file is never copied. On
    other devices unquantized weights are converted to ``dtype``, that of the activations.
    ``upload`` copies the bytes.
    """
    raise AssertionError(f"no tensor is made of {type(weight).__name__}")


@to_torch.register
def _(
    weight: StoredWeight,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    upload: Upload | None = None,
) -> WeightTensor:
    device = torch.device(device)
    upload = upload or upload_at_once(device)
    if weight.is_quantized:
        rows, columns = weight.shape
        blocks = upload(weight.data, torch.uint8, torch.uint8)
        return BlockTensor(weight.type, blocks, (rows, columns))
    type = FLOAT_DTYPES[weight.type]
    values = upload(weight.data, type, type if device.type == "cpu" else dtype)
    return values.view(weight.shape)


@to_torch.register
def _(
    weight: CodedWeight,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    upload: Upload | None = None,
) -> WeightTensor:
    device = torch.device(device)
    upload = upload or upload_at_once(device)
    rows, columns = weight.shape
    if device.type == "cpu":

        def codes(start: int, stop: int) -> Tensor:
            return torch.from_numpy(weight.codes.rows(start, stop))
    else:  # one byte each: files are read once
        unpacked = upload(weight.codes.rows(0, rows), torch.uint8, torch.uint8)

        def codes(start: int, stop: int) -> Tensor:
            return unpacked[start:stop]

    def table(values: object) -> Tensor:
        made = torch.as_tensor(values, dtype=torch.float32)
        return made.reshape(1, 1).to(device) if made.ndim < 2 else made.to(device)

    groups = torch.arange(columns) // weight.group_size
    if weight.groups is not None:
        groups = torch.from_numpy(weight.groups).long()
    levels = None if weight.levels is None else torch.from_numpy(weight.levels).to(device)
    return CodedTensor(
        codes,
        table(weight.scales),
        table(weight.zeros),
        levels,
        groups.to(device),
        (rows, columns),
        weight.nbytes,
    )
