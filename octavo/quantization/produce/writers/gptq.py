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
from octavo.quantization.produce.writers.base import (
    Kind,
    NewTensor,
    all_codes,
    need,
    need_whole_groups,
    table,
)
from octavo.quantization.produce.writers.bits import pack_words

_BITS = (2, 3, 4, 8)


class GPTQWriter:
    name = "gptq"

    def check(self, name: str, shape: tuple[int, int], kind: Kind) -> None:
        need(name, "GPTQ", kind.bits in _BITS, f"{kind.bits} bits, it has {_BITS}")
        need_whole_groups(name, "GPTQ", shape, kind)
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            need(name, "GPTQ", size % 32 == 0, f"its {size} {what} are no multiple of 32")

    def tensors(self, weight: CodedWeight, kind: Kind) -> Mapping[str, NewTensor]:
        num_inputs = weight.shape[1]
        zeros = table(weight.zeros, weight).astype(np.uint8)
        ones = pack_words(np.ones(32, np.uint8), kind.bits).view("<u4")
        packed = pack_words(zeros.T, kind.bits).view("<u4")
        # In words of 32 bits, of which those of 3-bit codes come by threes.
        stored = _subtract(packed, np.tile(ones, packed.shape[1] // len(ones)))
        groups = np.arange(num_inputs) // weight.group_size
        return {
            "qweight": NewTensor("I32", pack_words(all_codes(weight), kind.bits).T),
            "qzeros": NewTensor("I32", stored),
            "scales": NewTensor("F16", table(weight.scales, weight).T.astype(np.float16)),
            "g_idx": NewTensor("I32", groups.astype("<i4")),
        }

    def config(self, kind: Kind, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": kind.bits,
            "group_size": -1 if kind.group_size is None else kind.group_size,
            "sym": kind.symmetric,
            "desc_act": False,
            "lm_head": False,
            "true_sequential": True,
            "checkpoint_format": "gptq",
            "format": "gptq",
        }


def _subtract(words: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """Word by word, modulo 2^32."""
    return (words - ones).view("<i4")
