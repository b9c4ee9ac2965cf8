"""Types of weights: bits of their numbers, and the scales beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from octavo.cost.rank_model import Arithmetic


@dataclass(frozen=True, slots=True)
class WeightType:
    """Numbers of some bits, and scales for blocks of them.

    Args:
        arithmetic: what products with them are computed in.
        scale_bytes: of what each block has beside its numbers, zero points included.
        block_outputs, block_inputs: numbers in a block; 0 is all of them.
    """

    name: str
    bits: float
    arithmetic: Arithmetic
    scale_bytes: float = 0.0
    block_outputs: int = 1
    block_inputs: int = 0

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Bytes of a matrix; a vector has 0 inputs."""
        columns = max(1, inputs)
        blocks = ceil(outputs / (self.block_outputs or outputs)) * ceil(
            columns / (self.block_inputs or columns)
        )
        return outputs * columns * self.bits / 8 + blocks * self.scale_bytes


FLOATS = {
    "float32": WeightType("float32", 32, "fp32"),
    "float16": WeightType("float16", 16, "fp16"),
    "bfloat16": WeightType("bfloat16", 16, "fp16"),
}
FLOAT_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def int4(group: int, name: str = "") -> WeightType:
    """The type of GPTQ and AWQ weights: a 16-bit scale and a 4-bit zero point."""
    return WeightType(name or f"int4-g{group}", 4, "fp16", 2.5, 1, group)


QUANTIZED = {
    "fp8": WeightType("fp8", 8, "fp8", 4.0),
    "fp8-block": WeightType("fp8-block", 8, "fp8", 4.0, 128, 128),
    "int8": WeightType("int8", 8, "int8", 4.0),
    "int4": int4(128, "int4"),
    "gptq": int4(128, "gptq"),
    "awq": int4(128, "awq"),
    "nvfp4": WeightType("nvfp4", 4, "fp4", 1.0, 1, 16),
    "mxfp4": WeightType("mxfp4", 4, "fp16", 1.0, 1, 32),
    "nf4": WeightType("nf4", 4, "fp16", 4.0, 1, 64),
}
_ALIASES = {"w8a8": "int8", "w4a16": "int4", "fp4": "nvfp4", "bitsandbytes": "nf4"}
_GROUPED = re.compile(r"(?:int4|gptq|awq|w4a16)-?g(\d+)")


def quantized_type(name: str) -> WeightType | None:
    """Find a type by a name of ``QUANTIZED``, or ``int4-gN`` with groups of N; None if it is none
    of these."""
    if grouped := _GROUPED.fullmatch(name):
        return int4(int(grouped[1])) if int(grouped[1]) else None
    return QUANTIZED.get(_ALIASES.get(name, name))
