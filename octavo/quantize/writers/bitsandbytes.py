"""The bitsandbytes format of NF4 with quantized scales (double quantization).

    weight                          uint8 [N * K / 2, 1]     two codes a byte, the first higher
    weight.absmax                   uint8 [blocks]           codes of the scales
    weight.nested_absmax            float32 [blocks / 256]   their scales
    weight.nested_quant_map         float32 [256]            the values of their codes
    weight.quant_map                float32 [16]             the values of the weights' codes
    weight.quant_state.bitsandbytes__nf4    uint8            JSON: types, sizes, the mean scale

Scales less their mean are rounded to a table that is finer near zero (8-bit optimizers,
arXiv 2110.02861): seven decades of powers of ten, the n-th with 2^n steps between 0.1 and 1 of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.quantization.coded import CodedWeight
from octavo.quantization.levels import NF4_BLOCK, NF4_LEVELS
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.base import WrittenPart, all_codes, need, table

_NESTED_BLOCK = 256
_STATE = "weight.quant_state.bitsandbytes__nf4"


class NF4Writer:
    name = "bnb"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("NF4", scheme.bits == 4, f"{scheme.bits} bits, and it has 4")
        need("NF4", shape[1] % NF4_BLOCK == 0, f"rows of {shape[1]} are no blocks of {NF4_BLOCK}")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        pairs = all_codes(weight).reshape(-1, 2)
        absmax, nested, offset = quantize_scales(table(weight.scales, weight).reshape(-1))
        state = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
            "nested_blocksize": _NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        text = json.dumps(state).encode()
        text += b" " * (-(len(absmax) + len(text)) % 4)  # so that floats after it are aligned
        return {
            "weight": WrittenPart("U8", (pairs[:, :1] << 4 | pairs[:, 1:])),
            "weight.nested_absmax": WrittenPart("F32", nested),
            "weight.nested_quant_map": WrittenPart("F32", dynamic_map()),
            "weight.quant_map": WrittenPart("F32", NF4_LEVELS),
            "weight.absmax": WrittenPart("U8", absmax),
            _STATE: WrittenPart("U8", np.frombuffer(text, np.uint8)),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(left_out),
        }


def quantize_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Quantize scales: (codes uint8 [n], the largest magnitude of each block float32 [n / 256],
    the mean)."""
    offset = float(scales.mean(dtype=np.float32))
    centred = scales - np.float32(offset)
    padded = np.pad(centred, (0, -len(centred) % _NESTED_BLOCK)).reshape(-1, _NESTED_BLOCK)
    nested = np.abs(padded).max(axis=1)
    unit = padded / np.where(nested > 0, nested, 1)[:, None]
    levels = dynamic_map()
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit).astype(np.uint8)
    return codes.reshape(-1)[: len(scales)], nested.astype("<f4"), offset


def dequantize_scales(codes: np.ndarray, nested: np.ndarray, offset: float) -> np.ndarray:
    """Dequantize scales: float32 [n]."""
    block = np.arange(len(codes)) // _NESTED_BLOCK
    return dynamic_map()[codes] * nested[block] + np.float32(offset)


def dynamic_map() -> np.ndarray:
    """The code table of scales: float32 [256], ascending from above -1 to 1."""
    positive = []
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        positive.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    magnitudes = np.concatenate(positive)
    return np.sort(np.concatenate([-magnitudes, [0.0], magnitudes, [1.0]])).astype("<f4")
