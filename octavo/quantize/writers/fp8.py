"""The FP8 format of DeepSeek's checkpoints, with scales of blocks of 128 x 128.

weight             float8_e4m3 [N, K]
weight_scale_inv   float32 [N / 128, K / 128], rounded up: the scales that codes are multiplied with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.quantization.coded import CodedWeight
from octavo.quantization.levels import FP8_BLOCK
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.base import WrittenPart, all_codes, need, table


class FP8BlockWriter:
    name = "fp8"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("FP8", scheme.bits == 8, f"{scheme.bits} bits, and it has 8")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        scales = table(weight.scales, weight)[::FP8_BLOCK]
        return {
            "weight_scale_inv": WrittenPart("F32", scales.astype("<f4")),
            "weight": WrittenPart("F8_E4M3", all_codes(weight)),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": list(left_out),
        }
