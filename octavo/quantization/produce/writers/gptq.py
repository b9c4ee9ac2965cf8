"""GPTQ, as GPTQModel and AutoGPTQ have it (``checkpoint_format`` "gptq", which is version 1).

    qweight   int32 [K * bits / 32, N]            packed along K
    qzeros    int32 [K / group, N * bits / 32]    zeros less one, packed along N
    scales    float16 [K / group, N]
    g_idx     int32 [K]                           k // group; older readers need it

One is subtracted from whole words, as readers add it to whole words: a zero of 0 borrows from its
neighbour and gives back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.quantization.coded import CodedWeight
from octavo.quantization.produce.scheme import Scheme
from octavo.quantization.produce.writers.base import (
    Part,
    all_codes,
    group_size,
    need,
    table,
)
from octavo.quantization.produce.writers.bits import pack_words

_BITS = (2, 3, 4, 8)


class GPTQWriter:
    name = "gptq"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("GPTQ", scheme.bits in _BITS, f"{scheme.bits} bits, it has {_BITS}")
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            need("GPTQ", size % 32 == 0, f"its {size} {what} are no multiple of 32")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, Part]:
        num_inputs = weight.shape[1]
        zeros = table(weight.zeros, weight).astype(np.uint8)
        ones = pack_words(np.ones(32, np.uint8), scheme.bits).view("<u4")
        packed = pack_words(zeros.T, scheme.bits).view("<u4")
        # In words of 32 bits, of which those of 3-bit codes come by threes.
        stored = _subtract(packed, np.tile(ones, packed.shape[1] // len(ones)))
        groups = np.arange(num_inputs) // weight.group_size
        return {
            "qweight": Part("I32", pack_words(all_codes(weight), scheme.bits).T),
            "qzeros": Part("I32", stored),
            "scales": Part("F16", table(weight.scales, weight).T.astype(np.float16)),
            "g_idx": Part("I32", groups.astype("<i4")),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": group_size(scheme) or -1,
            "sym": scheme.symmetric,
            "desc_act": False,
            "lm_head": False,
            "true_sequential": True,
            "checkpoint_format": "gptq",
            "format": "gptq",
        }


def _subtract(words: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """Word by word, modulo 2^32."""
    return (words - ones).view("<i4")
