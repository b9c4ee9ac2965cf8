"""The AWQ format of AutoAWQ (version "gemm"), 4 bits with zero points.

    qweight   int32 [K, N / 8]          packed along N
    qzeros    int32 [K / group, N / 8]  likewise
    scales    float16 [K / group, N]

The eight codes of a word are those of the columns 0, 2, 4, 6, 1, 3, 5, 7, the first lowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.quantization.coded import CodedWeight
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.base import (
    WrittenPart,
    all_codes,
    group_size,
    need,
    table,
)
from octavo.quantize.writers.bits import pack_words

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQWriter:
    name = "awq"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("AWQ", scheme.bits == 4, f"{scheme.bits} bits, it has 4")
        need("AWQ", shape[0] % 8 == 0, f"its {shape[0]} outputs are no multiple of 8")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        return {
            "qweight": WrittenPart("I32", _pack(all_codes(weight).T)),
            "qzeros": WrittenPart("I32", _pack(table(weight.zeros, weight).T.astype(np.uint8))),
            "scales": WrittenPart("F16", table(weight.scales, weight).T.astype(np.float16)),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size(scheme) or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(left_out),
        }


def _pack(codes: np.ndarray) -> np.ndarray:
    """Pack codes, uint8 [rows, N], to int32 [rows, N / 8]."""
    by_word = codes.reshape(len(codes), -1, 8)[..., _ORDER]
    return pack_words(by_word.reshape(len(codes), -1), 4)
