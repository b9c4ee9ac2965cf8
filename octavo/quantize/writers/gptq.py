"""The GPTQ format of GPTQModel and AutoGPTQ.

    qweight   int32 [K * bits / 32, N]            packed along K
    qzeros    int32 [K / group, N * bits / 32]    packed along N
    scales    float16 [K / group, N]
    g_idx     int32 [K]                           k // group; older readers need it

Zeros are stored less one in version 1 (``checkpoint_format`` "gptq"), which everything reads, and
as they are in version 2 ("gptq_v2"), which GPTQModel and octavo read. Version 1 has no zero of 0:
some readers add one to each value, others to whole words, and so they disagree about what follows
it. They also disagree about all zeros of 3 bits, where GPTQModel's words to add belong to another
order. So version 1 is written where zeros are the middle and no code lies in two words.
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

_BITS = (2, 3, 4, 8)


class GPTQWriter:
    name = "gptq"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("GPTQ", scheme.bits in _BITS, f"{scheme.bits} bits, it has {_BITS}")
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            need("GPTQ", size % 32 == 0, f"its {size} {what} are no multiple of 32")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        num_inputs = weight.shape[1]
        zeros = table(weight.zeros, weight).astype(np.uint8)
        stored = zeros - np.uint8(_version(scheme) == 1)
        groups = np.arange(num_inputs) // weight.group_size
        return {
            "qweight": WrittenPart("I32", pack_words(all_codes(weight), scheme.bits).T),
            "qzeros": WrittenPart("I32", pack_words(stored.T, scheme.bits)),
            "scales": WrittenPart("F16", table(weight.scales, weight).T.astype(np.float16)),
            "g_idx": WrittenPart("I32", groups.astype("<i4")),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        layout = "gptq" if _version(scheme) == 1 else "gptq_v2"
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": group_size(scheme) or -1,
            "sym": scheme.symmetric,
            "desc_act": False,
            "lm_head": False,
            "true_sequential": True,
            "checkpoint_format": layout,
            "format": layout,
        }


def _version(scheme: Scheme) -> int:
    """The version of the format, which says how zeros are stored."""
    return 1 if scheme.symmetric and 32 % scheme.bits == 0 else 2
