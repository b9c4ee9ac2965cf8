"""GGUF files: metadata and a table of tensors, read by mapping the file into memory.

::

    "GGUF" | u32 version | u64 number of tensors | u64 number of metadata entries
    metadata entries   string key | u32 value type | value
    tensor table       string name | u32 number of dimensions | u64 each, innermost first
                       | u32 GGMLType | u64 offset from the data start
    padding            up to a multiple of general.alignment (32 if absent): the data start
    data               of the tensors, each at a multiple of the alignment

    string             u64 length | bytes
    array              u32 value type | u64 count | values

All numbers are little-endian. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A file is untrusted. Every count, length, type, offset and product is a Python int (which cannot
wrap) and is compared with the bytes that are left before anything is allocated or viewed; the
limits below bound what opening any file can cost to about a second and 256 MiB. Whatever is wrong
with the file is a ModelFileError that names the field and the byte at which it was found.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.models.mapped_file import map_file
from octavo.quantization.ggml_types import GGMLType, block_shape

MAX_ENTRIES = 1 << 16  # metadata entries, and tensors
MAX_KEY_BYTES = 1 << 16  # also of tensor names
MAX_STRING_BYTES = 16 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
# Of everything before the tensor data. The largest vocabularies of today (262k tokens and 515k
# merges) need half of this. Decoded strings can take four times their bytes, and 80 bytes each.
MAX_HEADER_BYTES = 40 << 20
MAX_STRINGS = 1_500_000
MAX_INVALID_BYTES = 1 << 18  # of strings that are not UTF-8: decoding those is slow

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {  # metadata value type -> (format, numpy's name of it)
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (_U32, "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    BOOL: (struct.Struct("<B"), "<u1"),
    10: (_U64, "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_TENSOR_TYPES = {int(type): type for type in GGMLType}
_OTHER_FILES = {  # how files begin that are often found in place of a GGUF file
    b"version https://git-lfs": "this is a Git LFS pointer, not the model; run: git lfs pull",
    b"<": "this is a web page, not a model; check the address that it was downloaded from",
    b"PK": "this is a zip archive (a PyTorch checkpoint?), not a GGUF file",
    b"tjgg": "this is a GGML file of 2023; convert the original model with a current llama.cpp",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. ``shape`` is outermost first, as in torch: (N, K) for a matrix
    that maps K values to N. ``offset`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of ``shape[-1]`` values; 1 for a vector."""
        return prod(self.shape[:-1])


class GGUFFile:
    """An open GGUF file. The header is parsed and checked here; tensor data is read when used.

    ``metadata`` maps keys to bool, int, float, str, lists of str, and one-dimensional numpy arrays
    of anything else. Keys and tensor names must be UTF-8. Other strings may be arbitrary bytes (a
    token can be half a character): bytes that are not UTF-8 become ``\\xNN`` in the text, so that
    the result can always be encoded again, and different tokens stay different.

    ModelFileError if the file cannot be opened or is damaged. The file must not be truncated while
    it is open: the operating system answers with SIGBUS when a missing page is touched, of which a
    process dies (csrc/bus_error.cpp has it say why).
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._map = map_file(self.path)
        try:
            header = _Header(self.path, self._map)
            self.version, num_tensors, num_entries = header.counts()
            self.metadata = MappingProxyType(header.metadata(num_entries))
            self.alignment = header.alignment
            self.tensors = header.tensors(num_tensors)
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> np.ndarray:
        """Bytes of a tensor: uint8 (rows, bytes per row), a view of the mapped file."""
        if (tensor := self.tensors.get(name)) is None:
            raise ModelFileError(self.path, "the file has no such tensor", field=_quote(name))
        if self._map.size() < tensor.offset + tensor.num_bytes:
            raise ModelFileError(
                self.path,
                "the file was truncated after it was opened",
                field=f"{_quote(name)} data",
                offset=tensor.offset,
            )
        flat = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(tensor.num_rows, -1)

    def close(self) -> None:
        """Unmap the file, or leave that to the last array of ``data()`` that is still in use.
        After it, ``data()`` may raise ValueError; metadata and the tensor table stay."""
        with suppress(BufferError):
            self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _quote(name: str) -> str:
    """A name from the file for a message: short, and without control characters."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class _Header:
    """Reads the header front to back. ``subject`` is what errors are about at the moment."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.limit = min(len(data), MAX_HEADER_BYTES)
        self.position = 0
        self.subject = ""
        self.num_strings = 0
        self.num_invalid_bytes = 0
        self.alignment = 32

    def error(self, part: str, reason: str, offset: int) -> ModelFileError:
        field = f"{self.subject} {part}".strip()
        return ModelFileError(self.path, reason, field=field, offset=offset)

    def overrun(self, part: str, start: int, end: int) -> ModelFileError:
        if end > len(self.data):
            reason = (
                f"this needs a file of {end} bytes, but it has {len(self.data)}: "
                "it is truncated or damaged; download it again"
            )
        else:
            reason = f"the header is larger than the {MAX_HEADER_BYTES} bytes that octavo reads"
        return self.error(part, reason, start)

    def take(self, num_bytes: int, part: str) -> int:
        """Position of the next ``num_bytes`` bytes, which exist; moves behind them."""
        start = self.position
        self.position = end = start + num_bytes
        if end > self.limit:
            raise self.overrun(part, start, end)
        return start

    def number(self, form: struct.Struct, part: str) -> Any:
        return form.unpack_from(self.data, self.take(form.size, part))[0]

    def string(self, part: str, max_bytes: int) -> bytes:
        offset = self.position
        length = self.number(_U64, part)
        if length > max_bytes:
            raise self.error(part, f"{length} bytes are too long; {max_bytes} are allowed", offset)
        start = self.take(length, part)
        return self.data[start : start + length]

    def name(self, part: str, taken: Mapping[str, Any]) -> str:
        """A metadata key or tensor name: not empty, UTF-8, and not one of those before it."""
        offset = self.position
        raw = self.string(part, MAX_KEY_BYTES)
        if not raw:
            raise self.error(part, "it is empty", offset)
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(part, f"not UTF-8: {error.reason}", offset + 8 + error.start) from None
        if name in taken:
            raise self.error(part, f"{_quote(name)} is there twice", offset)
        return name

    def counts(self) -> tuple[int, int, int]:
        """(version, number of tensors, number of metadata entries)."""
        magic = self.data[:4]
        if magic != b"GGUF" and not (len(self.data) < 4 and b"GGUF".startswith(magic)):
            found = (why for start, why in _OTHER_FILES.items() if self.data[:32].startswith(start))
            raise self.error("magic", next(found, f"not a GGUF file: it begins with {magic!r}"), 0)
        self.take(4, "magic")
        version = self.number(_U32, "version")
        if version not in (2, 3):
            raise self.error("version", _why_version_is_refused(version), 4)
        num_tensors = self.number(_U64, "tensor count")
        num_entries = self.number(_U64, "metadata count")
        for part, count, offset in (
            ("tensor count", num_tensors, 8),
            ("metadata count", num_entries, 16),
        ):
            if count > MAX_ENTRIES:
                raise self.error(part, f"{count} is more than {MAX_ENTRIES}", offset)
        return version, num_tensors, num_entries

    def metadata(self, num_entries: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for index in range(num_entries):
            self.subject = f"metadata entry {index}"
            key = self.name("key", entries)
            self.subject = _quote(key)
            kind = self.number(_U32, "value type")
            offset = self.position
            entries[key] = self.value(kind)
            if key == "general.alignment":
                self.alignment = self.checked_alignment(entries[key], offset)
        return entries

    def value(self, kind: int) -> Any:
        """The value of a metadata entry, of whose value type the position is just behind."""
        start = self.position
        if kind == STRING:
            raw = self.string("value", MAX_STRING_BYTES)
            try:
                return raw.decode()
            except UnicodeDecodeError:
                return self.escaped(raw, "value", start)
        if kind == ARRAY:
            return self.array()
        if kind not in NUMBERS:
            raise self.error("value type", f"{kind} is no type of metadata", start - 4)
        value = self.number(NUMBERS[kind][0], "value")
        if kind != BOOL:
            return value
        if value > 1:
            raise self.error("value", f"a bool is 0 or 1, not {value}", start)
        return bool(value)

    def array(self) -> list[str] | np.ndarray:
        start = self.position
        kind = self.number(_U32, "array type")
        count = self.number(_U64, "array length")
        if kind == STRING:
            return self.strings(count)
        if kind == ARRAY:
            raise self.error("array type", "octavo reads no arrays of arrays", start)
        if kind not in NUMBERS:
            raise self.error("array type", f"{kind} is no type of metadata", start)
        dtype = np.dtype(NUMBERS[kind][1])
        first = self.take(count * dtype.itemsize, "array length")
        # A copy, because elements in the file are not aligned.
        array = np.ndarray((count,), dtype, self.data, first).copy()
        if kind != BOOL:
            return array
        if count and array.max() > 1:
            index = int((array > 1).argmax())
            raise self.error("value", f"a bool is 0 or 1, not {array[index]}", first + index)
        return array.view(np.bool_)

    def strings(self, count: int) -> list[str]:
        """``count`` strings in a row: a vocabulary, so this loop is what opening a file takes."""
        offset = self.position - 8
        if offset + 8 + 8 * count > self.limit:
            raise self.overrun("array length", offset, offset + 8 + 8 * count)
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            reason = f"the metadata has more than the {MAX_STRINGS} strings that octavo reads"
            raise self.error("array length", reason, offset)
        data, limit, unpack = self.data, self.limit, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        end = self.position
        for _ in range(count):
            start = end + 8
            if start > limit:
                raise self.overrun(f"string {len(strings)}", end, start)
            end = start + unpack(data, end)[0]
            if end > limit or end - start > MAX_STRING_BYTES:
                self.position = start - 8
                self.string(f"string {len(strings)}", MAX_STRING_BYTES)  # says what is wrong
            raw = data[start:end]
            try:
                append(raw.decode())
            except UnicodeDecodeError:
                append(self.escaped(raw, f"string {len(strings)}", start - 8))
        self.position = end
        return strings

    def escaped(self, raw: bytes, part: str, offset: int) -> str:
        """Text of a value that is not UTF-8."""
        self.num_invalid_bytes += len(raw)
        if self.num_invalid_bytes > MAX_INVALID_BYTES:
            raise self.error(part, "too many strings up to this one are not UTF-8", offset)
        return raw.decode("utf-8", "backslashreplace")

    def checked_alignment(self, value: Any, offset: int) -> int:
        if type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
            return value
        reason = f"must be a power of two from 8 to {MAX_ALIGNMENT}"
        if isinstance(value, (int, float)):
            reason += f", not {value}"
        raise self.error("value", reason, offset)

    def tensors(self, num_tensors: int) -> dict[str, GGUFTensor]:
        """The tensor table; every tensor is aligned, inside the file, and apart from the others."""
        table: dict[str, tuple[tuple[int, ...], GGMLType, int, int]] = {}
        offset_at: dict[str, int] = {}
        for index in range(num_tensors):
            self.subject = f"tensor {index}"
            name = self.name("name", table)
            self.subject = _quote(name)
            table[name] = self.tensor()
            offset_at[name] = self.position - 8
        data_start = -(-self.position // self.alignment) * self.alignment

        tensors: dict[str, GGUFTensor] = {}
        for name, (shape, type, num_bytes, offset) in table.items():
            self.subject = _quote(name)
            if offset % self.alignment:
                reason = f"{offset} is not a multiple of the alignment, {self.alignment}"
                raise self.error("offset", reason, offset_at[name])
            start = data_start + offset
            if start + num_bytes > len(self.data):
                raise self.overrun("data", offset_at[name], start + num_bytes)
            tensors[name] = GGUFTensor(name, shape, type, start, num_bytes)
        for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if one.offset + one.num_bytes > other.offset:
                self.subject = _quote(other.name)
                reason = f"its data overlaps that of {_quote(one.name)}"
                raise self.error("offset", reason, offset_at[other.name])
        return tensors

    def tensor(self) -> tuple[tuple[int, ...], GGMLType, int, int]:
        """Shape, type, bytes, and offset from the data start, of the tensor that was just named."""
        at = self.position
        num_dims = self.number(_U32, "number of dimensions")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            reason = f"must be 1 to {MAX_DIMENSIONS}, not {num_dims}"
            raise self.error("number of dimensions", reason, at)
        dims = [self.number(_U64, "dimensions") for _ in range(num_dims)]
        if 0 in dims:
            raise self.error("dimensions", f"none may be 0: {dims}", at + 4 + 8 * dims.index(0))
        type_id = self.number(_U32, "type")
        if type_id not in _TENSOR_TYPES:
            reason = f"octavo knows no tensor type {type_id}; a newer octavo may, or it is damaged"
            raise self.error("type", reason, self.position - 4)
        type = _TENSOR_TYPES[type_id]
        values, size = block_shape(type)
        if dims[0] % values:
            reason = f"rows of {type.name} are multiples of {values} values, not {dims[0]}"
            raise self.error("dimensions", reason, at + 4)
        num_bytes = prod(dims) // values * size
        return tuple(reversed(dims)), type, num_bytes, self.number(_U64, "offset")


def _why_version_is_refused(version: int) -> str:
    if version == 1:
        return "GGUF version 1 is obsolete; convert the model again with a current llama.cpp"
    if version and version & 0xFFFF == 0:
        return "a big-endian file; octavo reads little-endian ones: convert it, or find another"
    return f"octavo reads GGUF versions 2 and 3, not {version}; a newer octavo may read it"
