"""bitsandbytes: NF4 and FP4 in blocks, and int8 by rows.

::

    weight                      [N * K / 2, 1], two codes a byte, the first in the upper half;
                                of any type, as which the bytes are stored
    weight.quant_map            F32 [16], the value of each code
    weight.absmax               F32 [blocks]; U8 where it is quantized itself
    weight.quant_state....      U8, JSON: blocksize, shape, nested_blocksize, nested_offset, ...
    weight.nested_absmax        F32 [blocks / 256], where absmax is quantized
    weight.nested_quant_map     F32 [256]

    value = quant_map[code] * absmax[block]
    absmax[b] = nested_quant_map[code[b]] * nested_absmax[b // 256] + nested_offset

    weight                      I8 [N, K]
    SCB                         F32 [N]
    weight_format               U8, 0 for rows

    value = weight * SCB / 127

Blocks run over the rows one after the other, so a block may have the end of one row and the start
of the next. Papers: arXiv 2305.14314 (NF4), 2208.07339 (int8). Layout: bitsandbytes 0.50
``functional.py``, ``nn/modules.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.codes import ByteCodes, HighFirstNibbles
from octavo.quantization.formats.grid import ceil_div
from octavo.quantization.formats.stored import Parts, StoredTensor
from octavo.quantization.ggml_types import GGMLType

_STATES = {
    "quant_state.bitsandbytes__nf4": "nf4",
    "quant_state.bitsandbytes__fp4": "fp4",
}
_OF_WEIGHT = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)
_OF_MODULE = ("weight", "SCB", "weight_format")
_MAX_STATE_BYTES = 1 << 16


class BitsAndBytes:
    """Reader of bitsandbytes weights, see the module and ``WeightFormat``."""

    name = "bitsandbytes"

    def __init__(self, fields: Fields):
        """Takes nothing from the config: each weight has its settings beside it."""

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        for part in _OF_WEIGHT:
            if tensor_name.endswith(f".weight.{part}"):
                return tensor_name.removesuffix(f".{part}"), part
        module, _, part = tensor_name.rpartition(".")
        return (f"{module}.weight", part) if part in _OF_MODULE else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> Weight:
        tensors = Parts(name, parts)
        if "SCB" in tensors or "weight_format" in tensors:
            return _int8(tensors)
        return _four_bits(tensors)


def _int8(parts: Parts) -> CodedWeight:
    weight = parts.need("weight", "I8", dims=2)
    num_outputs, num_inputs = weight.shape
    scales = parts.need("SCB", "F32")
    if scales.shape not in ((num_outputs,), (num_outputs, 1), (1, num_outputs)):
        raise scales.error(f"the shape is {list(scales.shape)}, not [{num_outputs}]")
    layout = parts.find("weight_format")
    if layout is not None and layout.of("U8").bytes.any():
        raise UnsupportedModelError(
            f"{layout.path} ({layout.name}): this int8 weight has the layout of a GPU kernel; "
            "save the model again with a recent bitsandbytes, which stores plain rows"
        )
    return CodedWeight(
        format="int8",
        shape=(num_outputs, num_inputs),
        bits=8,
        group_size=num_inputs,
        codes=ByteCodes(weight.bytes.reshape(weight.shape), flip=128),
        scales=scales.floats().reshape(-1, 1) / np.float32(127),
        zeros=128.0,
        nbytes=parts.nbytes,
    )


def _four_bits(parts: Parts) -> Weight:
    state_part = next(filter(parts.find, _STATES), next(iter(_STATES)))
    state = _state(parts.need(state_part, "U8"))
    num_outputs, num_inputs = state.each("shape", Fields.integer, 2)
    data = parts.need("weight", "U8", "I8", "BF16", "F16", "F32")
    if data.nbytes != ceil_div(num_outputs * num_inputs, 2):
        raise data.error(
            f"{data.nbytes} bytes are not two values each of {num_outputs} x {num_inputs}"
        )
    levels = parts.need("quant_map", "F32").shaped(16).floats()
    block_size = state.integer("blocksize")
    absmax = _absmax(parts, state, ceil_div(num_outputs * num_inputs, block_size))
    shape = num_outputs, num_inputs
    scales = _scales_of_rows(absmax, shape, block_size)
    if scales is None:
        return _across_rows(data, absmax, shape, block_size, levels)
    return CodedWeight(
        format=_STATES[state_part],
        shape=shape,
        bits=4,
        group_size=min(block_size, num_inputs),
        codes=HighFirstNibbles(data.bytes.reshape(num_outputs, -1)),
        scales=scales,
        zeros=0.0,
        levels=levels,
        nbytes=parts.nbytes,
    )


def _state(stored: StoredTensor) -> Fields:
    """The JSON that is stored as a tensor."""
    if stored.nbytes > _MAX_STATE_BYTES:
        raise stored.error(f"{stored.nbytes:,} bytes; {_MAX_STATE_BYTES:,} are allowed")
    try:
        state: Any = json.loads(stored.bytes.tobytes())
    except (ValueError, RecursionError) as error:
        raise stored.error(f"not JSON: {error}") from error
    if not isinstance(state, dict):
        raise stored.error("is not a JSON object")
    prefix = f"{stored.name}."  # so that errors name the tensor
    return Fields(stored.path, {prefix + key: value for key, value in state.items()}, prefix)


def _absmax(parts: Parts, state: Fields, num_blocks: int) -> np.ndarray:
    """The largest magnitude of each block: float32 [blocks]."""
    stored = parts.need("absmax", "F32", "U8").shaped(num_blocks)
    if stored.dtype == "F32":
        return stored.floats()
    nested_size = state.integer("nested_blocksize")
    levels = parts.need("nested_quant_map", "F32").shaped(256).floats()
    outer = parts.need("nested_absmax", "F32").shaped(ceil_div(num_blocks, nested_size)).floats()
    offset = state.number("nested_offset", above=-np.inf)
    block = np.arange(num_blocks) // nested_size
    return levels[stored.bytes] * outer[block] + np.float32(offset)


def _scales_of_rows(
    absmax: np.ndarray, shape: tuple[int, int], block_size: int
) -> np.ndarray | None:
    """Scales float32 [N, groups] if each block lies within a row or covers whole rows, else
    None."""
    num_outputs, num_inputs = shape
    if num_inputs % 2:  # a row ends within a byte
        return None
    if num_inputs % block_size == 0:
        return absmax.reshape(num_outputs, -1)
    if block_size % num_inputs == 0:
        return absmax[np.arange(num_outputs) * num_inputs // block_size, None]
    return None


def _across_rows(
    data: StoredTensor,
    absmax: np.ndarray,
    shape: tuple[int, int],
    block_size: int,
    levels: np.ndarray,
) -> Weight:
    """Dequantize a weight whose blocks cross rows, since no kernel reads such blocks."""
    num_values = shape[0] * shape[1]
    codes = HighFirstNibbles(data.bytes.reshape(1, -1)).rows(0, 1)[0, :num_values]
    values = levels[codes] * absmax[np.arange(num_values) // block_size]
    return StoredWeight(GGMLType.F32, values.view(np.uint8).reshape(shape[0], -1), shape)
