"""GGUF files, written: the other direction of gguf.py, which draws what they are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.base.files import NewFile
from octavo.models.gguf import ARRAY, BOOL, NUMBERS, STRING
from octavo.quantization.ggml_types import GGMLType, row_bytes

VERSION = 3
ALIGNMENT = 32
# numpy's name -> metadata value type
_ARRAY_TYPES = {name: kind for kind, (_, name) in NUMBERS.items() if kind != BOOL}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a file to be.

    Args:
        shape: outermost first, as in torch.
        chunks: its bytes, in as many pieces as are at hand; together ``num_bytes``. They are asked
            for when it is this tensor's turn, so a file may be larger than memory.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    chunks: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a file, atomically.

    Values of ``metadata`` are what ``GGUFFile.metadata`` has: bool, int (of 32 bits, or of 64 where
    they are too few; without a sign unless it is negative), float (of 32 bits), str, lists of str,
    and one-dimensional arrays.
    ValueError for a tensor whose chunks are not as long as its shape says.
    """
    with NewFile(path) as new:
        _write_header(new.file, metadata, tensors)
        for tensor in tensors:
            _write_data(new.file, tensor)
        new.publish(sync=True)


def _write_header(
    file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]
) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _value(value))
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        file.write(_string(tensor.name) + struct.pack("<I", len(tensor.shape)) + sizes)
        file.write(struct.pack("<IQ", tensor.type, offset))
        offset += _aligned(tensor.num_bytes)
    _pad(file)


def _write_data(file: BinaryIO, tensor: TensorToWrite) -> None:
    written = 0
    for chunk in tensor.chunks:
        written += file.write(np.ascontiguousarray(chunk).view(np.uint8).data)
    if written != tensor.num_bytes:
        raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.num_bytes}")
    _pad(file)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    position = file.tell()
    file.write(bytes(_aligned(position) - position))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The value type and the value."""
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        if value >> 32 > 0:
            return struct.pack("<IQ", 10, value)
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = BOOL if value.dtype == np.bool_ else _ARRAY_TYPES[f"<{value.dtype.str[1:]}"]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
    texts = b"".join(map(_string, value))
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + texts
