"""One safetensors file, its tensors as views of the mapped file.

::

    u64 length of the header | JSON: name -> {dtype, shape, data_offsets} | data

The library that the format comes from checks a file; but as arrays it only hands out what numpy has
a type for, and bfloat16 is not among that.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from octavo.base.errors import ModelFileError
from octavo.models.mapped_file import map_file

_LENGTH_BYTES = 8
_ALIGNMENT = 4  # of the largest numbers, float32


class SafetensorsFile:
    """An open file. ``tensors``: for each name its dtype, as it is called there, and its shape.

    ModelFileError if it cannot be opened or is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="np") as checked:
                names = list(checked.keys())
        except SafetensorError as error:
            raise ModelFileError(path, f"not a sound safetensors file: {error}") from error
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error}") from error
        self._map = map_file(path)
        self._start = _LENGTH_BYTES + int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        header = json.loads(self._map[_LENGTH_BYTES : self._start])
        self._offsets: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in names:
            entry: dict[str, Any] = header[name]
            self.tensors[name] = entry["dtype"], tuple(entry["shape"])
            self._offsets[name] = tuple(entry["data_offsets"])

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first byte of each tensor in the file, and the number of its bytes, in the order of
        ``tensors``."""
        return [(self._start + begin, end - begin) for begin, end in self._offsets.values()]

    def num_bytes(self, name: str) -> int:
        begin, end = self._offsets[name]
        return end - begin

    def data(self, name: str) -> np.ndarray:
        """Bytes of a tensor: uint8 [rows, bytes of a row], as those of a GGUF file."""
        begin, end = self._offsets[name]
        _, shape = self.tensors[name]
        if self._map.size() < self._start + end:
            raise ModelFileError(
                self.path, "the file was truncated after it was opened", field=name
            )
        flat = np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)
        if flat.ctypes.data % _ALIGNMENT:  # no writer does this, but a file may
            flat = flat.copy()
        rows = prod(shape[:-1])
        return flat.reshape(rows, flat.size // rows if rows else 0)
