"""Matrices on the device, as floats or as codes with scales.

    weight = pack([q, k, v], device, dtype)         one matrix: the rows of q, k and v; packing.py
    products.linear(x, weight, out, fusion)         products.py

Codes of 4 bits lie in the order in which kernels read them::

    words [K / 8, N]    of each 128 inputs, word r holds those 16 apart from r on:

        word r    | r | r + 16 | r + 32 | ... | r + 112 |     4 bits each, the lowest first

So one nibble of 16 words is 16 consecutive inputs of an output: a tile of the matrix without any
reordering. Outputs lie side by side, as the threads that read them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

TILE_K = 128  # inputs of 16 words, which a kernel reads together
PLANES = 8  # nibbles of a word
PLANE_K = TILE_K // PLANES


class DeviceWeight(Protocol):
    """A matrix [N, K] on the device, in any form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        ...

    @property
    def format(self) -> str:
        """Name of its form for messages: "bfloat16", "4 bits in 32"."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers [N, K], as a copy or as they are stored."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight(DeviceWeight):
    """A matrix of floats.

    Args:
        values: [N, K], contiguous.
        expanded: formats of those of its rows that were codes in their file.
    """

    values: Tensor
    expanded: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def format(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class W4Weight(DeviceWeight):
    """Codes in 0 to 15: value = scale * code + min, or scale * (code - 8).

    ``group`` inputs share a scale: 16, 32, 64 or 128. K is padded to K', a multiple of TILE_K, with
    groups whose scales and mins are 0.
    """

    words: Tensor  # int32 [K' / 8, N]
    scales: Tensor  # float16 [K' / group, N]
    mins: Tensor | None  # likewise; None: a code of 8 stands for 0
    group: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.words, self.scales, self.mins)

    @property
    def format(self) -> str:
        return f"4 bits in {self.group}"

    def narrow(self, start: int, stop: int) -> W4Weight:
        """Rows ``start`` to ``stop`` as a view, with the strides of the whole."""
        words, scales = self.words[:, start:stop], self.scales[:, start:stop]
        mins = None if self.mins is None else self.mins[:, start:stop]
        return W4Weight(words, scales, mins, self.group, (words.shape[1], self.shape[1]))

    def dense(self, dtype: torch.dtype) -> Tensor:
        shifts = 4 * torch.arange(PLANES, dtype=torch.int32, device=self.words.device)
        planes = self.words.unflatten(0, (-1, 1, PLANE_K)) >> shifts[:, None, None]
        codes = (planes & 15).flatten(0, 2).unflatten(0, (-1, self.group))
        if self.mins is None:
            values = (codes - 8) * self.scales.float()[:, None]
        else:
            values = codes * self.scales.float()[:, None] + self.mins[:, None]
        return values.flatten(0, 1)[: self.shape[1]].t().to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class W8Weight(DeviceWeight):
    """A matrix in codes of a byte: value = scale * code + min.

    ``group`` inputs share a scale: 16, 32, 64 or 128; or None for all inputs of a row.
    ``rounds_activations`` as in ``CodedWeight``, for one scale a row only: other weights have no
    such products.
    """

    codes: Tensor  # int8 or float8_e4m3fn [N, K], contiguous
    scales: Tensor  # float16 or float32 [K / group, N], [1, N] of rows
    mins: Tensor | None  # likewise; None: nothing is added
    group: int | None
    rounds_activations: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.codes, self.scales, self.mins)

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def format(self) -> str:
        kind = "FP8" if self.is_fp8 else "int8"
        if self.group is not None:
            return f"{kind} in {self.group}"
        made_for = ", for activations of 8 bits" if self.rounds_activations else ""
        return f"{kind} by rows{made_for}"

    def narrow(self, start: int, stop: int) -> W8Weight:
        """Rows ``start`` to ``stop`` as a view."""
        mins = None if self.mins is None else self.mins[:, start:stop]
        codes, scales = self.codes[start:stop], self.scales[:, start:stop]
        return replace(self, codes=codes, scales=scales, mins=mins)

    def dense(self, dtype: torch.dtype) -> Tensor:
        k = self.shape[1]
        groups = torch.arange(k, device=self.codes.device) // (self.group or k)
        values = self.codes.float() * self.scales.t()[:, groups].float()
        if self.mins is not None:
            values += self.mins.t()[:, groups]
        return values.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedWeight(DeviceWeight):
    """A matrix whose rows are in parts of different forms, stacked."""

    parts: Sequence[DeviceWeight]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def format(self) -> str:
        return ", ".join(part.format for part in self.parts)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts])


def parts_of(weight: DeviceWeight) -> Sequence[DeviceWeight]:
    """The parts of a joined weight; otherwise the weight itself."""
    return weight.parts if isinstance(weight, JoinedWeight) else [weight]


def _bytes_of(*parts: Tensor | None) -> int:
    return sum(part.nbytes for part in parts if part is not None)
