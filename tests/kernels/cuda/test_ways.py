"""By what products are computed."""

from __future__ import annotations

import pytest
import torch
from device_weights import KINDS, device_weight

from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.ways import Conditions, Way, table, way_of

ADA, AMPERE = Gpu(89, 128), Gpu(80, 108)


def ways(kind, gpu=ADA, dtype=torch.bfloat16, n=64, exact=False):
    weight, conditions = device_weight(kind, n, 512, dtype), Conditions(gpu, dtype, exact=exact)
    return [way_of(weight, rows, conditions) for rows in (1, 16, 32, 64, 65)]


def test_floats():
    assert ways("float") == [Way.FUSED] * 2 + [Way.GEMM] * 3


@pytest.mark.parametrize("kind", ["nibbles in 128", "int8 in 16", "FP8 in 128"])
def test_codes_in_groups(kind):
    assert ways(kind) == [Way.FUSED] * 4 + [Way.EXPANDED]


def test_int8_by_rows():
    assert ways("int8 by rows", AMPERE) == [Way.FUSED] * 2 + [Way.INT8] * 3
    assert ways("int8 by rows", n=72) == [Way.FUSED] * 4 + [Way.EXPANDED]


def test_fp8_only_where_the_gpu_has_it():
    assert ways("FP8 by rows") == [Way.FUSED] * 2 + [Way.FP8] * 3
    assert ways("FP8 by rows", AMPERE) == [Way.FUSED] * 4 + [Way.EXPANDED]
    assert ways("FP8 by rows", dtype=torch.float16) == [Way.FUSED] * 4 + [Way.EXPANDED]


@pytest.mark.parametrize("kind", ["int8 by rows", "FP8 by rows"])
def test_exact_activations_are_not_rounded(kind):
    assert ways(kind, exact=True) == [Way.FUSED] * 4 + [Way.EXPANDED]


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_is_one_way_for_any_rows(kind):
    weight = device_weight(kind, 64, 512)
    conditions = Conditions(ADA, invariant=True)
    assert {way_of(weight, rows, conditions) for rows in range(1, 600)} == {Way.TILES}


def test_the_table_has_every_kind():
    rows = dict(table(Conditions(ADA)))
    assert len(rows) == 11 and rows["bfloat16"] == [Way.FUSED] * 2 + [Way.GEMM] * 2
    assert rows["FP8 by rows"] == [Way.FUSED] * 2 + [Way.FP8] * 2
    assert all(ways == [Way.TILES] * 4 for _, ways in table(Conditions(ADA, invariant=True)))
