"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats, with an exponent for each 32 of them.

gpt-oss stores its experts so in safetensors; rows of all experts are stacked::

    NAME_blocks  uint8 [experts, rows, K / 32, 16]   two codes a byte, the first in the low bits
    NAME_scales  uint8 [experts, rows, K / 32]       exponents, with a bias of 127

GGUF files have blocks (``block_mxfp4`` of ggml-common.h)::

    block        | exponent | 16 bytes: code i in the low bits of byte i, code 16 + i above it |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from octavo.base.fields import Fields
from octavo.quantization.coded import CodedWeight, Codes
from octavo.quantization.formats.codes import RowStreams
from octavo.quantization.formats.stored import Parts, StoredTensor
from octavo.quantization.levels import E2M1, E8M0

_GROUP = 32
_BLOCK_BYTES = 1 + _GROUP // 2
_PARTS = ("blocks", "scales")


class MXFP4:
    """Reader of MXFP4 weights in safetensors, see the module and ``WeightFormat``."""

    name = "mxfp4"

    def __init__(self, fields: Fields):
        """Takes nothing from the config: the format has no settings."""

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        name, _, part = tensor_name.rpartition("_")
        return (name, part) if part in _PARTS else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> CodedWeight:
        tensors = Parts(name, parts)
        blocks = tensors.need("blocks", "U8", dims=4)
        scales = tensors.need("scales", "U8", dims=3).shaped(*blocks.shape[:3])
        if blocks.shape[3] != _GROUP // 2:
            raise blocks.error(f"blocks of {blocks.shape[3]} bytes, not of {_GROUP // 2}")
        rows, groups = prod(blocks.shape[:2]), blocks.shape[2]
        streams = RowStreams(blocks.bytes.reshape(rows, -1), 4, groups * _GROUP)
        return _weight(streams, scales.bytes.reshape(rows, groups), tensors.nbytes)


def read_blocks(data: np.ndarray) -> CodedWeight:
    """Read the rows of a GGUF tensor: uint8 [N, bytes of a row]."""
    blocks = data.reshape(len(data), -1, _BLOCK_BYTES)
    return _weight(_BlockCodes(blocks), blocks[:, :, 0], data.nbytes)


def _weight(codes: Codes, exponents: np.ndarray, nbytes: int) -> CodedWeight:
    rows, groups = exponents.shape
    return CodedWeight(
        format=MXFP4.name,
        shape=(rows, groups * _GROUP),
        bits=4,
        group_size=_GROUP,
        codes=codes,
        scales=E8M0[exponents],
        zeros=0.0,
        levels=E2M1,
        nbytes=nbytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _BlockCodes:
    """Codes of blocks, uint8 [N, blocks, 17]."""

    blocks: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        pairs = self.blocks[start:stop, :, 1:]
        return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(pairs), -1)
