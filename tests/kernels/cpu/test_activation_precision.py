"""Which activations have remainders: how they are told to the kernels, and what comes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.kernels.cpu.activation_precision import ACTIVATIONS, DEFAULT, round_activations
from octavo.kernels.fused_ops import (
    FusedCheck,
    FusedHead,
    FusedLinear,
    FusedNorm,
    FusedOp,
    FusedSegment,
)
from octavo.kernels.recorder import Tape, Value
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.capacity import RankSpec, kv_dtype_of
from octavo.settings.engine import EngineArgs


def step() -> list[FusedOp]:
    weight = StoredWeight(GGMLType.F32, np.zeros((8, 32), dtype=np.uint8), (8, 8))
    x, y, z = (Value(Tape(), None, (8,)) for _ in range(3))
    norm = FusedNorm(np.ones(8, dtype=np.float32), 1e-5)
    return [
        FusedLinear(x, [FusedSegment(weight, None, y)], norm=norm),
        FusedLinear(y, [FusedSegment(weight, None, z)], residual=x),
        FusedCheck(z),
        FusedHead(z, weight, norm=norm),
    ]


@pytest.mark.parametrize(
    ("activations", "above"),
    [("int8", [math.inf] * 3), ("int16", [0.0] * 3), ("mixed", [4.5, 7, 4.5])],
)
def test_choices(activations, above):
    ops = step()
    round_activations(ops, "int8" if activations == "int16" else "int16")  # does not last
    round_activations(ops, activations)
    assert [op.remainder_above for op in ops if not isinstance(op, FusedCheck)] == above


def test_auto_is_the_default():
    chosen, default = step(), step()
    round_activations(chosen, "auto")
    round_activations(default, DEFAULT)
    assert chosen[0].remainder_above == default[0].remainder_above


def test_all_of_them_can_be_asked_for():
    for activations in ("auto", *ACTIVATIONS):
        assert EngineArgs(activations=activations).activations == activations


def test_exact_activations_have_exact_keys_and_values(tmp_path):
    def kv_dtype(activations: str, kv_cache_dtype: str = "auto") -> str:
        spec = RankSpec(
            tmp_path, "cpu", "float32", activations=activations, kv_cache_dtype=kv_cache_dtype
        )
        return kv_dtype_of(spec, is_native=True)

    assert kv_dtype("auto") == kv_dtype("int8") == "bfloat16"
    assert kv_dtype("int16") == "float32"
    assert kv_dtype("int16", "bf16") == "bfloat16"
