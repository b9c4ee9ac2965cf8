"""By what products are computed."""

from __future__ import annotations

import pytest
import torch
from device_weights import KINDS, device_weight

from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.gemm_dispatch import (
    GemmConditions,
    GemmKind,
    gemm_kind,
    multiplied_as,
    table,
)

ADA, AMPERE = Gpu(89, 128), Gpu(80, 108)


def gemm_kinds(kind, gpu=ADA, dtype=torch.bfloat16, n=64, activations="auto", k=512):
    weight = device_weight(kind, n, k, dtype)
    conditions = GemmConditions(gpu, dtype, activations=activations)
    return [gemm_kind(weight, rows, conditions) for rows in (2, 16, 32, 64, 65)]


def test_floats():
    assert gemm_kinds("float") == [GemmKind.FUSED] * 2 + [GemmKind.GEMM] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone(kind):
    conditions = GemmConditions(ADA)
    one = gemm_kind(device_weight(kind, 64, 512, torch.bfloat16), 1, conditions)
    is_bytes_in_groups = kind.startswith(("int8 in", "FP8 in"))
    assert one is (GemmKind.FUSED if is_bytes_in_groups else GemmKind.VECTOR)


@pytest.mark.parametrize("kind", ["nibbles in 128", "int8 in 16", "FP8 in 128"])
def test_codes_in_groups(kind):
    assert gemm_kinds(kind) == [GemmKind.FUSED] * 4 + [GemmKind.EXPANDED]


@pytest.mark.parametrize("kind", ["int8 by rows", "FP8 by rows", "FP8 for FP8"])
def test_bytes_of_odd_rows_are_expanded_sooner(kind):
    assert gemm_kinds(kind, k=770) == [GemmKind.FUSED] * 2 + [GemmKind.EXPANDED] * 3
    assert gemm_kinds("nibbles in 128", k=896) == [GemmKind.FUSED] * 4 + [GemmKind.EXPANDED]


def test_int8_by_rows():
    assert gemm_kinds("int8 for int8", AMPERE) == [GemmKind.FUSED] * 2 + [GemmKind.INT8] * 3
    assert gemm_kinds("int8 for int8", n=72) == [GemmKind.FUSED] * 4 + [GemmKind.EXPANDED]


def test_fp8_only_where_the_gpu_has_it():
    assert gemm_kinds("FP8 for FP8") == [GemmKind.FUSED] * 2 + [GemmKind.FP8] * 3
    assert gemm_kinds("FP8 for FP8", AMPERE) == [GemmKind.FUSED] * 4 + [GemmKind.EXPANDED]
    assert gemm_kinds("FP8 for FP8", dtype=torch.float16) == [GemmKind.FUSED] * 4 + [
        GemmKind.EXPANDED
    ]


@pytest.mark.parametrize("kind", ["int8", "FP8"])
def test_the_checkpoint_decides_unless_somebody_does(kind):
    as_numbers = [GemmKind.FUSED] * 4 + [GemmKind.EXPANDED]
    in_codes = [GemmKind.FUSED] * 2 + [GemmKind[kind.upper()]] * 3
    other, made_for_it = f"{kind} by rows", f"{kind} for {kind}"
    assert gemm_kinds(other) == as_numbers and gemm_kinds(made_for_it) == in_codes
    assert (
        gemm_kinds(other, activations="int8")
        == gemm_kinds(made_for_it, activations="int8")
        == in_codes
    )
    assert (
        gemm_kinds(other, activations="int16")
        == gemm_kinds(made_for_it, activations="int16")
        == as_numbers
    )


def test_groups_are_never_multiplied_in_8_bits():
    for kind in ("int8 in 16", "FP8 in 128", "nibbles in 128"):
        assert gemm_kinds(kind, activations="int8") == gemm_kinds(kind)


@pytest.mark.parametrize(
    ("conditions", "type"),
    [
        ({}, torch.int8),
        ({"activations": "int16"}, torch.bfloat16),
        ({"invariant": True}, torch.bfloat16),
    ],
)
def test_the_type_of_products_is_that_of_their_way(conditions, type):
    weight = device_weight("int8 for int8", 64, 512)
    assert multiplied_as(weight, GemmConditions(ADA, **conditions)) == type


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_is_one_way_for_any_rows(kind):
    weight = device_weight(kind, 64, 512)
    conditions = GemmConditions(ADA, invariant=True)
    assert {gemm_kind(weight, rows, conditions) for rows in range(1, 600)} == {GemmKind.TILES}


def test_the_table_has_every_kind():
    rows = dict(table(GemmConditions(ADA)))
    alone, fused = GemmKind.VECTOR, GemmKind.FUSED
    assert len(rows) == 13 and rows["bfloat16"] == [alone, fused] + [GemmKind.GEMM] * 2
    assert rows["FP8 by rows"] == [alone, fused, fused, GemmKind.EXPANDED]
    of_8_bits = "FP8 by rows, for activations of 8 bits"
    assert rows[of_8_bits] == [alone, fused] + [GemmKind.FP8] * 2
    assert all(
        kinds == [GemmKind.TILES] * 4 for _, kinds in table(GemmConditions(ADA, invariant=True))
    )
