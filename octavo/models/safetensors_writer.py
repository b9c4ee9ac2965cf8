"""Safetensors files, written: the other direction of safetensors.py, which draws what they are.

The header comes first in the file, and is known last. So room is left for it, which the format
allows to be filled up with spaces; data then begin at a page of their own, too. What does not fit
(data above the size of a shard, names above the room) begins another shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAX_SHARD_BYTES = 5_000_000_000

_HEADER_ROOM = 256 << 10  # with the eight bytes of its length
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Transformers takes no file for its own that does not say so.
_METADATA = {"format": "pt"}
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of a checkpoint to be.

    ``dtype``: as safetensors calls it (F32, BF16, I32, F8_E4M3, ...). ``chunks``: its bytes, in as
    many arrays as are at hand; they are asked for when it is this tensor's turn.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(
    folder: Path, tensors: Iterable[NewTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write ``model.safetensors``, or shards and their index, into a folder that is there.

    Tensors are asked for one after the other, so that one at a time need be in memory; they lie in
    the files in this order. Give those of wide numbers first where sizes are odd, as nothing can
    be put between two tensors to align the second.

    Raises:
        ValueError: chunks are not as long as the shape says; a name is there twice, or too long.
        OSError: a file cannot be written.
    """
    shards: list[_Shard] = []
    try:
        for tensor in tensors:
            if any(tensor.name in shard.entries for shard in shards):
                raise ValueError(f"{tensor.name} is there twice")
            if not shards or not shards[-1].has_room(tensor, max_shard_bytes):
                shards.append(_Shard(folder / f"{len(shards)}.part"))
            shards[-1].write(tensor)
        for shard in shards:
            shard.write_header()
    finally:
        for shard in shards:
            shard.file.close()
    if not shards:
        raise ValueError("a checkpoint without tensors")
    _name_shards(folder, shards)


def _name_shards(folder: Path, shards: list[_Shard]) -> None:
    if len(shards) == 1:
        shards[0].path.rename(folder / _WHOLE)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.path.rename(folder / name)
        places.update(dict.fromkeys(shard.entries, name))
    index = {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": places,
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Shard:
    """A file whose data are written tensor by tensor, and its header at last.

    ``entries``: what the header says of each tensor, as JSON.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file: BinaryIO = open(path, "xb")  # noqa: SIM115 (its maker closes it)
        self.file.seek(_HEADER_ROOM)
        self.entries: dict[str, str] = {}
        self.num_bytes = 0
        self._header_bytes = len(self._header()) + 8

    def has_room(self, tensor: NewTensor, max_bytes: int) -> bool:
        header_bytes = self._header_bytes + len(self._entry(tensor).encode()) + 1
        return self.num_bytes + tensor.num_bytes <= max_bytes and header_bytes <= _HEADER_ROOM

    def write(self, tensor: NewTensor) -> None:
        entry = self._entry(tensor)
        self._header_bytes += len(entry.encode()) + 1  # with a comma
        if self._header_bytes > _HEADER_ROOM:
            raise ValueError(f"{tensor.name:.100}...: the name is too long")
        _write_chunks(self.file, tensor)
        self.entries[tensor.name] = entry
        self.num_bytes += tensor.num_bytes

    def write_header(self) -> None:
        self.file.seek(0)
        self.file.write((_HEADER_ROOM - 8).to_bytes(8, "little"))
        self.file.write(self._header().ljust(_HEADER_ROOM - 8))

    def _header(self) -> bytes:
        metadata = f'"__metadata__":{json.dumps(_METADATA)}'
        return f"{{{','.join([metadata, *self.entries.values()])}}}".encode()

    def _entry(self, tensor: NewTensor) -> str:
        offsets = [self.num_bytes, self.num_bytes + tensor.num_bytes]
        entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        return f"{json.dumps(tensor.name)}:{json.dumps(entry)}"


def _write_chunks(file: BinaryIO, tensor: NewTensor) -> None:
    written = sum(file.write(data) for data in _bytes_of(tensor.chunks))
    if written != tensor.num_bytes:
        raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.num_bytes}")


def _bytes_of(chunks: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for chunk in chunks:
        yield np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
