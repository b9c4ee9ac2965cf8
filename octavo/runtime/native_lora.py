"""Adapters on the native kernels: their matrices in the order of ``csrc/lora.h``, and a step's.

A linear of the program is a site, with an entry in each adapter. Its matrices A lie on top of each
other, as all multiply the same input::

    q_proj, k_proj, v_proj: A [r, K] each     ->  [tiles of 16 rows][K][16]
    each B [N, r]                             ->  [tiles of 16 outputs][r][16]
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.batch import Batch
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import TILE
from octavo.kernels.cpu.program import LoraSite
from octavo.models.config import EMBEDDING, HEAD
from octavo.quantization.base import float_bytes
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.lora_pool import PooledLora

if TYPE_CHECKING:
    from octavo.lora.targets import LowRank

_FORMATS = {"float32": (abi.OCT_F32, GGMLType.F32), "bfloat16": (abi.OCT_BF16, GGMLType.BF16)}


class NativeLora:
    """One adapter packed for a program. ``struct`` refers to arrays that live as long as this."""

    def __init__(
        self, format: int, sites: ctypes.Array[abi.LoraSite], arrays: Sequence[np.ndarray]
    ):
        self._sites, self._arrays = sites, arrays
        self.struct = abi.Lora(format, len(sites), ctypes.addressof(sites))
        self.num_bytes = sum(each.nbytes for each in arrays)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class NativeLoras:
    """Packs adapters for a program's sites, and writes those of a step into its arguments.

    ``shapes``: (outputs, inputs) of what adapters may change, by name.

    Args:
        dtype: "float32" or "bfloat16", of packed matrices.
    """

    def __init__(
        self,
        sites: Sequence[LoraSite],
        max_num_seqs: int,
        dtype: str,
    ):
        self._sites = sites
        self.shapes = {
            name: shape
            for site in sites
            for name, shape in zip(_names(site), site.shapes, strict=True)
            if name
        }
        self._format, self._type = _FORMATS[dtype]
        self._of_seq = array("i", bytes(4 * max_num_seqs))
        self._addresses = array("Q", bytes(8 * max_num_seqs))
        self._of_step: list[NativeLora] = []  # kept alive for the step

    def pack(self, changes: Mapping[str, LowRank]) -> NativeLora:
        """Return an adapter, of changes that fit the parameters they are named after."""
        sites = (abi.LoraSite * len(self._sites))()
        arrays: list[np.ndarray] = []
        for target, site in zip(sites, self._sites, strict=True):
            found = [changes.get(name) for name in _names(site)]
            if any(found):
                self._fill(target, site, found, arrays)
        return NativeLora(self._format, sites, arrays)

    def write(self, batch: Batch, arguments: abi.Batch) -> None:
        """Tell a step the adapters of its requests."""
        adapters = [item.request.adapter for item in batch.items]
        arguments.lora_of_seq = None
        if not any(adapters):
            return
        numbers: dict[str, int] = {}
        self._of_step = []
        for place, adapter in enumerate(adapters):
            number = -1
            if adapter is not None:
                number = numbers.setdefault(adapter.digest, len(numbers))
                if number == len(self._of_step):
                    assert isinstance(adapter, PooledLora)
                    self._of_step.append(adapter.needed())
            self._of_seq[place] = number
        for number, lora in enumerate(self._of_step):
            self._addresses[number] = lora.address
        arguments.lora_of_seq = self._of_seq.buffer_info()[0]
        arguments.loras = self._addresses.buffer_info()[0]
        arguments.num_loras = len(self._of_step)

    def _fill(
        self,
        target: abi.LoraSite,
        site: LoraSite,
        changes: Sequence[LowRank | None],
        arrays: list[np.ndarray],
    ) -> None:
        """Fill a site with the changes of its matrices."""
        stacked = [each.a for each in changes if each is not None]
        scales = np.repeat(
            np.array([each.scale for each in changes if each is not None], dtype=np.float32),
            [len(a) for a in stacked],
        )
        a = np.concatenate(stacked)
        is_embedding = site.kind == abi.OCT_OP_EMBED
        if not is_embedding:
            a, scales = _whole_tiles(a), _whole_tiles(scales)
        packed = a.T if is_embedding else _tiles(a)
        target.a = self._stored(packed, arrays)
        target.a_bytes = arrays[-1].nbytes
        target.rows = len(a)
        arrays.append(scales)
        target.scales = scales.ctypes.data
        first = 0
        for index, change in enumerate(changes):
            if change is None:
                continue
            rows = site.rows[index]
            segment = target.segments[index]
            segment.rank, segment.first = change.rank, first
            segment.b = self._stored(_tiles(_whole_tiles(change.b[rows.start : rows.stop])), arrays)
            first += change.rank

    def _stored(self, values: np.ndarray, arrays: list[np.ndarray]) -> int:
        """Keep values in the type of adapters; return their address."""
        stored = float_bytes(np.ascontiguousarray(values), self._type)
        arrays.append(stored)
        return int(stored.ctypes.data)


def _names(site: LoraSite) -> Sequence[str]:
    """Return what adapters call the matrices: a tied head and its embedding are told apart."""
    fixed = {abi.OCT_OP_EMBED: (EMBEDDING,), abi.OCT_OP_HEAD: (HEAD,)}
    return fixed.get(site.kind, site.names)


def _whole_tiles(values: np.ndarray) -> np.ndarray:
    """Add rows of zeros up to whole tiles."""
    missing = -len(values) % TILE
    return np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))


def _tiles(rows: np.ndarray) -> np.ndarray:
    """Return a matrix [N, K], of whole tiles, as [N / 16, K, 16]."""
    return rows.reshape(-1, TILE, rows.shape[1]).transpose(0, 2, 1)
