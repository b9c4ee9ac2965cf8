"""Packs weights of files into matrices on the device, piece by piece.

    in the file                                     on the device
    floats                                          floats of the type of activations
    GGUF Q4_0, Q4_1, Q4_K; Q2_K, Q3_K               4 bits in groups of 32; of 16
    GGUF Q8_0, Q5_0, Q5_1, Q5_K, IQ4; Q6_K          int8 in groups of 32; of 16
    GPTQ, AWQ, compressed-tensors to 4 bits         4 bits in groups of 32, 64 or 128
        of more bits; MXFP4, NVFP4                  int8 in such groups, or of 16
        of 8 bits with one scale a row              int8 by rows
    FP8 (E4M3) by tensors and rows; by blocks       FP8 by rows; in groups of 128
    all others                                      floats of the type of activations

Group scales of integers are float16. Those of GGUF's K types are products of a float16 and an
integer in the file, and are rounded to 11 bits here: by up to 2**-11 of them, which moves a value
by about a hundredth of the step between codes. And they take more memory than in the file: 5 bits a
value in place of 4.5 of Q4_K, 9 in place of 5.5 of Q5_K and of 6.6 of Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.coded import Integers, as_integers
from octavo.kernels.cpu.layout import INTEGER_FORMATS
from octavo.kernels.cuda.weights import (
    PLANE_K,
    PLANES,
    TILE_K,
    DenseWeight,
    DeviceWeight,
    JoinedWeight,
    W4Weight,
    W8Weight,
    parts_of,
)
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.gguf_fields import fields_of
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import SEARCHED, Affine
from octavo.quantization.levels import E2M1, E4M3

Upload: TypeAlias = Callable[[Tensor], Tensor]
"""Brings a tensor of the host to the device."""

_PIECE_VALUES = 1 << 23  # uploaded at a time
_GROUPS = (128, 64, 32, 16)
_ROUNDING, _ROUNDING_IN_ROW = 2.0**-10, 2.0**-16  # as kernels/cpu/coded.py allows


def pack(
    weights: Sequence[Weight],
    device: torch.device | str,
    dtype: torch.dtype,
    upload: Upload | None = None,
    *,
    as_one: bool = False,
    as_floats: bool = False,
) -> DeviceWeight:
    """Pack weights of one K into one matrix on the device, in the order of the weights.

    Args:
        as_one: use one form for all of them: floats, if they have no other form in common.
        as_floats: use floats, for kernels that multiply with nothing else.
        dtype: of floats, and of codes that no kernel reads.
        upload: copies pieces to the device. They have the bytes of the file, and are unpacked on
            the device, except codes of Hugging Face's formats.
    """
    upload = upload or (lambda piece: piece.to(device))
    sources = [_source_of(weight, dtype, upload) for weight in weights]
    is_mixed = any(source.form != sources[0].form for source in sources)
    if as_floats or (as_one and is_mixed):
        sources = [_as_floats(weight, dtype, upload) for weight in weights]
    runs = [list(run) for _, run in groupby(sources, key=lambda source: source.form)]
    parts = []
    for run in runs:
        try:
            parts.append(_joined(run, device))
        except _NoFloat16:
            floats = [_as_floats(source.weight, dtype, upload) for source in run]
            parts.append(_joined(floats, device))
    return parts[0] if len(parts) == 1 else JoinedWeight(parts)


def expanded(weights: Mapping[str, DeviceWeight]) -> dict[str, tuple[str, int]]:
    """Weights that no kernel reads in the format of their file: by name, their formats and the
    bytes of the floats made from them."""
    found = {}
    for name, weight in weights.items():
        dense = [
            part for part in parts_of(weight) if isinstance(part, DenseWeight) and part.expanded
        ]
        if dense:
            formats = sorted({format for part in dense for format in part.expanded})
            found[name] = ", ".join(formats), sum(part.nbytes for part in dense)
    return found


class _NoFloat16(Exception):
    """Raised where float16 cannot hold the scales."""


class _Form(Protocol):
    """The form of a matrix on the device; matrices of equal forms can be joined."""

    def empty(self, n: int, k: int, device: torch.device | str) -> Any: ...

    def fill(self, made: Any, first: int, rows: Any) -> None:
        """Write rows, as a source reads them, to the matrix from the row ``first`` on."""
        ...


@dataclass(frozen=True, slots=True)
class _Source:
    """A weight of a file, its form, and the function that reads some of its rows for that form."""

    weight: Weight
    form: _Form
    read: Callable[[Any], Any]


def _joined(sources: Sequence[_Source], device: torch.device | str) -> DeviceWeight:
    """Join weights of one form to one matrix."""
    form = sources[0].form
    shapes = [source.weight.shape for source in sources]
    made: DeviceWeight = form.empty(sum(shape[0] for shape in shapes), shapes[0][1], device)
    first = 0
    for source in sources:
        for piece in _pieces(source.weight):
            form.fill(made, first, source.read(piece))
            first += piece.shape[0]
    if isinstance(made, DenseWeight):
        weights = [source.weight for source in sources]
        return replace(made, expanded=tuple(w.format for w in weights if w.is_quantized))
    return made


def _pieces(weight: Weight) -> Iterator[Weight]:
    num_rows, width = weight.shape
    step = max(1, _PIECE_VALUES // width)
    for start in range(0, num_rows, step):
        yield weight.narrow(start, min(start + step, num_rows))


# Forms.


class _Codes(NamedTuple):
    """Rows of codes on the device [rows, K], and their scales and mins [rows, groups]."""

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Floats:
    dtype: torch.dtype

    def empty(self, n: int, k: int, device: torch.device | str) -> DenseWeight:
        return DenseWeight(torch.empty(n, k, dtype=self.dtype, device=device))

    def fill(self, made: DenseWeight, first: int, rows: Tensor) -> None:
        made.values[first : first + len(rows)] = rows


@dataclass(frozen=True, slots=True)
class _Nibbles:
    group: int
    has_mins: bool

    def empty(self, n: int, k: int, device: torch.device | str) -> W4Weight:
        padded = -(-k // TILE_K) * TILE_K
        words = torch.empty(padded // PLANES, n, dtype=torch.int32, device=device)
        scales = torch.empty(padded // self.group, n, dtype=torch.float16, device=device)
        mins = torch.empty_like(scales) if self.has_mins else None
        return W4Weight(words, scales, mins, self.group, (n, k))

    def fill(self, made: W4Weight, first: int, rows: _Codes) -> None:
        into = made.narrow(first, first + len(rows.codes))
        into.words.copy_(_words(rows.codes))
        _fill_groups(into.scales, rows.scales)
        if into.mins is not None and rows.mins is not None:
            _fill_groups(into.mins, rows.mins)


@dataclass(frozen=True, slots=True)
class _Bytes:
    group: int | None
    codes: torch.dtype
    scales: torch.dtype
    mins: torch.dtype | None = None
    rounds_activations: bool = False

    def empty(self, n: int, k: int, device: torch.device | str) -> W8Weight:
        groups = 1 if self.group is None else -(-k // self.group)
        codes = torch.empty(n, k, dtype=self.codes, device=device)
        scales = torch.empty(groups, n, dtype=self.scales, device=device)
        mins = None if self.mins is None else torch.empty_like(scales, dtype=self.mins)
        return W8Weight(codes, scales, mins, self.group, self.rounds_activations)

    def fill(self, made: W8Weight, first: int, rows: _Codes) -> None:
        into = made.narrow(first, first + len(rows.codes))
        into.codes.copy_(rows.codes)
        _fill_groups(into.scales, rows.scales)
        if into.mins is not None and rows.mins is not None:
            _fill_groups(into.mins, rows.mins)


def _words(codes: Tensor) -> Tensor:
    """Pack codes [N, K] into words, int32 [K' / 8, N]."""
    n, k = codes.shape
    planes = F.pad(codes, (0, -k % TILE_K)).view(n, -1, PLANES, PLANE_K)
    words = planes[:, :, 0].int()
    for plane in range(1, PLANES):
        words |= planes[:, :, plane].int() << 4 * plane
    return words.reshape(n, -1).t()


def _fill_groups(into: Tensor, numbers: Tensor) -> None:
    """Transpose numbers [N, groups] into [groups, N]; groups of padding behind K become 0."""
    if into.dtype == torch.float16 and not _is_nearly(numbers.half(), numbers):
        raise _NoFloat16
    into[: numbers.shape[1]] = numbers.t()
    into[numbers.shape[1] :] = 0


def _is_nearly(rounded: Tensor, numbers: Tensor) -> bool:
    error = (rounded.float() - numbers).abs()
    largest = numbers.abs().amax(dim=1, keepdim=True)
    allowed = torch.maximum(numbers.abs() * _ROUNDING, largest * _ROUNDING_IN_ROW)
    return bool((error <= allowed).all())  # and no NaN


# Sources.


def _source_of(weight: Weight, dtype: torch.dtype, upload: Upload) -> _Source:
    if isinstance(weight, StoredWeight) and weight.type in SEARCHED:
        return _of_blocks(weight, upload)
    if isinstance(weight, CodedWeight):
        for reader in (_of_fp8, _of_int8_rows, _of_integers):
            if (source := reader(weight, upload)) is not None:
                return source
    return _as_floats(weight, dtype, upload)


def _as_floats(weight: Weight, dtype: torch.dtype, upload: Upload) -> _Source:
    def stored(rows: StoredWeight) -> Tensor:
        return dequantize(rows.type, upload(torch.from_numpy(rows.data))).view(rows.shape)

    def coded(rows: CodedWeight) -> Tensor:
        return upload(torch.from_numpy(rows.dequantize()))

    read = stored if isinstance(weight, StoredWeight) else coded
    return _Source(weight, _Floats(dtype), read)


def _of_blocks(weight: StoredWeight, upload: Upload) -> _Source:
    """Read GGUF blocks: codes of 4 bits, if levels are, else bytes."""
    format = SEARCHED[weight.type]
    is_affine, levels = isinstance(format, Affine), format.levels
    zero = 0 if is_affine else 8
    has_nibbles = levels.low + zero >= 0 and levels.high + zero <= 15

    def read(rows: StoredWeight) -> _Codes:
        fields = fields_of(rows.type, upload(torch.from_numpy(rows.data)))
        codes = fields.levels.to(torch.int8)
        return _Codes(
            codes + zero if has_nibbles else codes,
            fields.scales,
            fields.offsets if is_affine else None,
        )

    form: _Form
    if has_nibbles:
        form = _Nibbles(format.sub_block, is_affine)
    else:
        mins = torch.float16 if is_affine else None
        form = _Bytes(format.sub_block, torch.int8, torch.float16, mins)
    return _Source(weight, form, read)


def _of_fp8(weight: CodedWeight, upload: Upload) -> _Source | None:
    if weight.levels is None or weight.groups is not None or np.any(weight.zeros):
        return None
    if not np.array_equal(weight.levels, E4M3, equal_nan=True):
        return None
    k = weight.shape[1]
    group = None
    if weight.group_size < k:
        group = next((group for group in _GROUPS if weight.group_size % group == 0), None)
        if group is None:
            return None

    def read(rows: CodedWeight) -> _Codes:
        codes = upload(torch.from_numpy(rows.codes.rows(0, rows.shape[0])))
        scales = _by_group(rows.scales, rows, group or k)
        return _Codes(codes.view(torch.float8_e4m3fn), upload(scales))

    return _Source(weight, _scaled_bytes(weight, group, torch.float8_e4m3fn), read)


def _of_int8_rows(weight: CodedWeight, upload: Upload) -> _Source | None:
    """Read integers of 8 bits with one scale a row, which can be multiplied with integer
    activations."""
    n, k = weight.shape
    is_signed = weight.levels is None and weight.bits == 8 and np.all(weight.zeros == 128)
    if not is_signed or weight.groups is not None or weight.group_size < k:
        return None

    def read(rows: CodedWeight) -> _Codes:
        codes = upload(torch.from_numpy(rows.codes.rows(0, rows.shape[0])))
        return _Codes((codes ^ 128).view(torch.int8), upload(_by_group(rows.scales, rows, k)))

    return _Source(weight, _scaled_bytes(weight, None, torch.int8), read)


def _scaled_bytes(weight: CodedWeight, group: int | None, codes: torch.dtype) -> _Bytes:
    rounds_activations = weight.rounds_activations and group is None
    return _Bytes(group, codes, torch.float32, rounds_activations=rounds_activations)


def _by_group(table: np.ndarray, rows: CodedWeight, group: int) -> Tensor:
    """Expand a table of the weight's groups to groups of ``group`` inputs: float32
    [rows, groups]."""
    n, k = rows.shape
    of = np.arange(0, k, group) // rows.group_size
    return torch.from_numpy(np.broadcast_to(table, (n, rows.num_groups))[:, of].copy())


def _of_integers(weight: CodedWeight, upload: Upload) -> _Source | None:
    """Read the integers that the CPU's kernels have, in 4 bits or in 8."""
    integers = as_integers(weight)
    if integers is None:
        return None
    bits, has_min = _bits_of(integers), INTEGER_FORMATS[integers.format].has_min
    form: _Form
    if bits <= 4:
        form, zero = _Nibbles(integers.group, has_min), 0 if has_min else 8
    else:
        mins = torch.float32 if has_min else None
        form, zero = _Bytes(integers.group, torch.int8, torch.float16, mins), 0
    moved = 128 if has_min and bits == 8 else 0  # into the range of int8
    levels = (_levels_of(integers) + zero - moved).to(torch.int8)

    def read(rows: CodedWeight) -> _Codes:
        q, d, m = integers.read(rows)
        codes = upload(levels)[upload(torch.from_numpy(q)).int()]
        scales = upload(torch.from_numpy(d)).float()
        mins = None if m is None else upload(torch.from_numpy(m)).float() + moved * scales
        return _Codes(codes, scales, mins)

    return _Source(weight, form, read)


def _bits_of(integers: Integers) -> int:
    """Bits of the integers that are multiplied with scales: FP4 codes stand for 0 to 12 halves with
    a sign."""
    return 8 if integers.format == abi.OCT_W4F else INTEGER_FORMATS[integers.format].bits


def _levels_of(integers: Integers) -> Tensor:
    """Factor of the scale for each integer: int16 [2 ** bits]."""
    if integers.format == abi.OCT_W4F:
        return torch.from_numpy(2 * E2M1).to(torch.int16)
    traits = INTEGER_FORMATS[integers.format]
    middle = 0 if traits.has_min else 1 << (traits.bits - 1)
    return torch.arange(1 << traits.bits, dtype=torch.int16) - middle
