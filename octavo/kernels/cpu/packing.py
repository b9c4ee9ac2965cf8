"""Packed weights: which format a weight becomes, and its bytes in the order of csrc/pack.h.

    weight = pack(weight_of_a_file, library, pool)
    weight.as_struct()                                      what the kernels are handed

GGUF weights keep the integers and scales of their file, and what is not quantized its type.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from octavo.errors import UnsupportedModelError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Library, Pool
from octavo.quantization.base import Weight
from octavo.quantization.ggml_types import GGMLType

ALIGNMENT = 64

_FLOAT_FORMATS = {
    GGMLType.F32: abi.OCT_F32,
    GGMLType.F16: abi.OCT_F16,
    GGMLType.BF16: abi.OCT_BF16,
}


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a matrix of ``n`` rows and ``k`` columns is packed, and how many bytes that takes."""

    format: int
    n: int
    k: int
    group: int
    num_bytes: int

    def as_struct(self, address: int) -> abi.Weight:
        """The weight whose bytes are at ``address``; the caller keeps them there."""
        return abi.Weight(self.format, self.n, self.k, self.group, address)

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        return self.format, self.n, self.k, self.group, self.num_bytes


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
        """What the kernels take for it; valid as long as this object."""
        return self.spec.as_struct(self.data.ctypes.data)

    def unpack(self, library: Library, pool: Pool) -> np.ndarray:
        """float32 [n, k] that it stands for."""
        out = np.empty(self.shape, dtype=np.float32)
        struct = self.as_struct()
        library.check(library.lib.oct_unpack(pool, ctypes.byref(struct), out.ctypes.data))
        return out


def packed_format(weight: Weight, library: Library) -> PackedFormat:
    """What a weight becomes; UnsupportedModelError if there is no packed form of it."""
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


def stored_format(weight: Weight, library: Library) -> PackedFormat:
    """A weight as its file has it; UnsupportedModelError as of `packed_format`."""
    packed_format(weight, library)
    n, k = weight.shape
    return plain_format(abi.OCT_STORED + weight.type, n, k, 0, library)


def plain_format(format: int, n: int, k: int, group: int, library: Library) -> PackedFormat:
    """A format that is asked for by itself, as for weights that octavo quantizes."""
    num_bytes = library.check(library.lib.oct_packed_bytes(format, n, k, group))
    return PackedFormat(format, n, k, group, num_bytes)


def pack_into(
    weight: Weight, spec: PackedFormat, address: int, library: Library, pool: Pool
) -> None:
    """Pack ``weight`` into ``spec.num_bytes`` bytes at ``address``, which is aligned."""
    struct = ctypes.byref(spec.as_struct(address))
    lib = library.lib
    if weight.is_quantized:
        rows = np.ascontiguousarray(weight.data)
        code = lib.oct_pack_gguf(pool, struct, weight.type, rows.ctypes.data, address)
    else:
        values = np.ascontiguousarray(weight.data)
        code = lib.oct_pack(pool, struct, values.ctypes.data, None, None, address)
    library.check(code)


def pack(weight: Weight, library: Library, pool: Pool) -> PackedWeight:
    """A weight in packed form, in new memory."""
    spec = packed_format(weight, library)
    data = aligned(spec.num_bytes)
    pack_into(weight, spec, data.ctypes.data, library, pool)
    return PackedWeight(spec, data)


def pack_integers(
    spec: PackedFormat,
    q: np.ndarray,
    scales: np.ndarray,
    mins: np.ndarray | None,
    library: Library,
    pool: Pool,
) -> PackedWeight:
    """Pack integers (uint8 [n, k]) with scales and mins (float16 [n, groups]) of one's own."""
    groups = -(-spec.k // spec.group)
    for array, dtype, columns in ((q, "u1", spec.k), (scales, "f2", groups), (mins, "f2", groups)):
        if array is not None and (array.dtype != dtype or array.shape != (spec.n, columns)):
            raise ValueError(
                f"{dtype} [{spec.n}, {columns}] expected, not {array.dtype} {array.shape}"
            )
    q, scales = np.ascontiguousarray(q), np.ascontiguousarray(scales)
    mins = None if mins is None else np.ascontiguousarray(mins)
    data = aligned(spec.num_bytes)
    struct = spec.as_struct(data.ctypes.data)
    code = library.lib.oct_pack(
        pool,
        ctypes.byref(struct),
        q.ctypes.data,
        scales.ctypes.data,
        None if mins is None else mins.ctypes.data,
        data.ctypes.data,
    )
    library.check(code)
    return PackedWeight(spec, data)


def aligned(num_bytes: int) -> np.ndarray:
    """uint8 memory at a multiple of 64 bytes."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
