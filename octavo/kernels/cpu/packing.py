"""Packing of weights: the format that a weight becomes, and its bytes in the order of csrc/pack.h.

    weight = pack(weight_of_a_file, library, pool)
    weight.as_struct()                                      what the kernels take

GGUF weights keep the integers and scales of their file, and unquantized weights their type.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import singledispatch

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.coded import by_groups, in_runs, integers_in, packing_of, read_codes
from octavo.kernels.cpu.layout import CODE_FORMATS, columns_bytes
from octavo.kernels.cpu.library import Library, Pool
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.ggml_types import GGMLType

ALIGNMENT = 64

_FLOAT_FORMATS = {
    GGMLType.F32: abi.OCT_F32,
    GGMLType.F16: abi.OCT_F16,
    GGMLType.BF16: abi.OCT_BF16,
}
_COLUMN = np.dtype("<i4")
_DTYPES = {abi.OCT_F32: np.float32, abi.OCT_F16: np.float16}  # numpy types


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Packed form of a matrix of ``n`` rows and ``k`` columns, and its size in bytes.

    ``is_reordered``: columns are permuted. Behind the tiles there is the input of each, int32 [k].
    """

    format: int
    n: int
    k: int
    group: int
    num_bytes: int
    is_reordered: bool = False

    @property
    def columns_at(self) -> int:
        """Offset of the end of the tiles."""
        return self.num_bytes - columns_bytes(self.k, self.is_reordered)

    def as_struct(self, address: int) -> abi.Weight:
        """The struct of a weight whose bytes are at ``address``; the caller keeps them alive."""
        columns = address + self.columns_at if self.is_reordered else None
        return abi.Weight(self.format, self.n, self.k, self.group, address, columns)

    def as_tuple(self) -> tuple[int, int, int, int, int, bool]:
        return self.format, self.n, self.k, self.group, self.num_bytes, self.is_reordered

    def columns(self, data: np.ndarray) -> np.ndarray:
        """The input of each column, int32 [k], of a weight whose bytes (uint8) are ``data``."""
        return data[self.columns_at : self.num_bytes].view(_COLUMN)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix in memory of its own."""

    spec: PackedFormat
    data: np.ndarray  # uint8, at a multiple of 64 bytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.spec.n, self.spec.k

    @property
    def nbytes(self) -> int:
        return self.spec.num_bytes

    def as_struct(self) -> abi.Weight:
        """The struct for the kernels; valid as long as this object."""
        return self.spec.as_struct(self.data.ctypes.data)

    def unpack(self, library: Library, pool: Pool) -> np.ndarray:
        """Unpack to float32 [n, k]."""
        out = np.empty(self.shape, dtype=np.float32)
        struct = self.as_struct()
        library.check(library.lib.oct_unpack(pool, ctypes.byref(struct), out.ctypes.data))
        return out


@singledispatch
def packed_format(weight: Weight, library: Library) -> PackedFormat:
    """Choose the packed form of a weight; UnsupportedModelError if there is none."""
    raise AssertionError(f"no packed form is known of {type(weight).__name__}")


@packed_format.register
def _(weight: StoredWeight, library: Library) -> PackedFormat:
    n, k = weight.shape
    group = 0
    if weight.is_quantized:
        made, of = ctypes.c_int32(), ctypes.c_int32()
        code = library.lib.oct_gguf_format(weight.type, ctypes.byref(made), ctypes.byref(of))
        if code != abi.OCT_OK:
            raise UnsupportedModelError(
                f"the native kernels cannot run {weight.type.name} tensors; the reference ops can"
            )
        format, group = made.value, of.value
    else:
        format = _FLOAT_FORMATS[weight.type]
    return plain_format(format, n, k, group, library)


@packed_format.register
def _(weight: CodedWeight, library: Library) -> PackedFormat:
    n, k = weight.shape
    format, group, is_reordered = packing_of(weight)
    return plain_format(format, n, k, group, library, is_reordered)


@singledispatch
def in_place(weight: Weight, library: Library) -> tuple[PackedFormat, np.ndarray] | None:
    """Format and rows of a weight that kernels can read as its file stores it; None for others.

    Raises:
        UnsupportedModelError: as in `packed_format`.
    """
    return None


@in_place.register
def _(weight: StoredWeight, library: Library) -> tuple[PackedFormat, np.ndarray]:
    packed_format(weight, library)
    n, k = weight.shape
    spec = plain_format(abi.OCT_STORED + weight.type, n, k, 0, library)
    return spec, np.ascontiguousarray(weight.data)


def plain_format(
    format: int, n: int, k: int, group: int, library: Library, is_reordered: bool = False
) -> PackedFormat:
    """Describe a given format, as for weights that octavo quantizes."""
    num_bytes = library.check(library.lib.oct_packed_bytes(format, n, k, group))
    num_bytes += columns_bytes(k, is_reordered)
    return PackedFormat(format, n, k, group, num_bytes, is_reordered)


@singledispatch
def pack_into(
    weight: Weight, spec: PackedFormat, address: int, library: Library, pool: Pool
) -> None:
    """Pack ``weight`` into ``spec.num_bytes`` bytes at ``address``, which is aligned.

    ``spec`` is from ``packed_format``, of the whole weight where this is some rows of it. The
    columns behind the tiles are left to ``write_columns``.
    """
    raise AssertionError(f"no packed form is known of {type(weight).__name__}")


@pack_into.register
def _(weight: StoredWeight, spec: PackedFormat, address: int, library: Library, pool: Pool) -> None:
    rows = np.ascontiguousarray(weight.data)
    if weight.is_quantized:
        struct = ctypes.byref(spec.as_struct(address))
        lib = library.lib
        library.check(lib.oct_pack_gguf(pool, struct, weight.type, rows.ctypes.data, address))
    else:
        _pack_numbers(spec, rows, None, None, address, library, pool)


@pack_into.register
def _(weight: CodedWeight, spec: PackedFormat, address: int, library: Library, pool: Pool) -> None:
    ordered = in_runs(weight)
    if spec.format in CODE_FORMATS:
        codes, scales = read_codes(ordered, spec.format)
        _pack_numbers(spec, codes, scales, None, address, library, pool)
    elif spec.group:
        q, d, m = integers_in(ordered, spec.format).read(ordered)
        _pack_numbers(spec, q, d, m, address, library, pool)
    else:
        values = weight.dequantize().astype(_DTYPES[spec.format])
        _pack_numbers(spec, values, None, None, address, library, pool)


def write_columns(weight: Weight, spec: PackedFormat, data: np.ndarray) -> None:
    """Write the input of each column of a permuted weight to its place in ``data``."""
    assert isinstance(weight, CodedWeight)
    spec.columns(data)[:] = by_groups(weight)


def _pack_numbers(
    spec: PackedFormat,
    values: np.ndarray,
    scales: np.ndarray | None,
    mins: np.ndarray | None,
    address: int,
    library: Library,
    pool: Pool,
) -> None:
    """Call ``oct_pack`` with floats, or with integers and scales, [n, ...] each."""
    arrays = [None if a is None else np.ascontiguousarray(a) for a in (values, scales, mins)]
    pointers = [None if a is None else a.ctypes.data for a in arrays]
    struct = ctypes.byref(spec.as_struct(address))
    library.check(library.lib.oct_pack(pool, struct, *pointers, address))


def pack(weight: Weight, library: Library, pool: Pool) -> PackedWeight:
    """Pack a weight into new memory."""
    spec = packed_format(weight, library)
    data = aligned(spec.num_bytes)
    pack_into(weight, spec, data.ctypes.data, library, pool)
    if spec.is_reordered:
        write_columns(weight, spec, data)
    return PackedWeight(spec, data)


def pack_integers(
    spec: PackedFormat,
    q: np.ndarray,
    scales: np.ndarray,
    mins: np.ndarray | None,
    library: Library,
    pool: Pool,
) -> PackedWeight:
    """Pack integers (uint8 [n, k]) with given scales and mins (float16 [n, groups])."""
    groups = -(-spec.k // spec.group)
    for array, dtype, columns in ((q, "u1", spec.k), (scales, "f2", groups), (mins, "f2", groups)):
        if array is not None and (array.dtype != dtype or array.shape != (spec.n, columns)):
            raise ValueError(
                f"{dtype} [{spec.n}, {columns}] expected, not {array.dtype} {array.shape}"
            )
    data = aligned(spec.num_bytes)
    _pack_numbers(spec, q, scales, mins, data.ctypes.data, library, pool)
    return PackedWeight(spec, data)


def aligned(num_bytes: int) -> np.ndarray:
    """Allocate uint8 memory at a multiple of 64 bytes."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
