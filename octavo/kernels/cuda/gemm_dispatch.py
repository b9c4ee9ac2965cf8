"""Chooses the implementation of a matrix product (GEMM) by the kind of weight and the number of
rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.weights import (
    DenseWeight,
    DeviceWeight,
    JoinedWeight,
    W4Weight,
    W8Weight,
)

FEW_DENSE_ROWS = 16  # rows of a tensor-core instruction
FEW_CODED_ROWS = 64  # more rows are worth dequantizing the weight
CODED_ACTIVATION_ROWS = 32  # from here on 8-bit products are worth the rounding


class GemmKind(Enum):
    """Implementations of a matrix product; norms, activations and residual sums are part of it, or
    are launches of their own."""

    VECTOR = "one Triton kernel of multiply-adds, with activation, residual and mostly the norm"
    FUSED = "one Triton kernel, with activation and residual; norm by Triton"
    TILES = "FUSED in tiles of 32 rows, however many there are"
    GEMM = "cuBLAS; norm and activation by Triton"
    EXPANDED = "Triton to 16 bits, then cuBLAS; norm and activation by Triton"
    FP8 = "activations to FP8 by rows, torch._scaled_mm"
    INT8 = "activations to int8 by rows, torch._int_mm, scales by Triton"
    PARTS = "each of its parts by its own"


@dataclass(frozen=True, slots=True)
class GemmConditions:
    """Conditions of the choice besides the weight and the rows.

    Args:
        dtype: of activations.
        invariant: a row has the same bits whatever other rows there are.
        activations: as in ``EngineArgs``: "auto" rounds activations to 8 bits for weights whose
            checkpoint was made for that, "int8" for every weight with 8-bit products, "int16" for
            none.
    """

    gpu: Gpu
    dtype: torch.dtype = torch.bfloat16
    invariant: bool = False
    activations: str = "auto"


def gemm_kind(weight: DeviceWeight, num_rows: int, conditions: GemmConditions) -> GemmKind:
    """Implementation of the product of ``num_rows`` rows with a weight."""
    if isinstance(weight, JoinedWeight):
        return GemmKind.PARTS
    if conditions.invariant:
        return GemmKind.TILES
    if num_rows == 1 and _has_vector_kernel(weight):
        return GemmKind.VECTOR
    if isinstance(weight, DenseWeight):
        return GemmKind.FUSED if num_rows <= FEW_DENSE_ROWS else GemmKind.GEMM
    assert isinstance(weight, W4Weight | W8Weight)
    in_8_bits = _in_8_bits(weight, conditions)
    if in_8_bits is not None and num_rows >= CODED_ACTIVATION_ROWS:
        return in_8_bits
    return GemmKind.FUSED if num_rows <= _few_rows(weight) else GemmKind.EXPANDED


def _has_vector_kernel(weight: DeviceWeight) -> bool:
    """All formats but codes of a byte in groups."""
    return not isinstance(weight, W8Weight) or weight.group is None


def _few_rows(weight: W4Weight | W8Weight) -> int:
    """Most rows for which codes are multiplied directly.

    Codes of a byte in rows that are not aligned to 16 bytes are read one by one, which takes too
    many registers for many rows.
    """
    is_odd = isinstance(weight, W8Weight) and weight.shape[1] % 16
    return FEW_DENSE_ROWS if is_odd else FEW_CODED_ROWS


def multiplied_as(weight: DeviceWeight, conditions: GemmConditions) -> torch.dtype:
    """Dtype in which the rows of a long prompt are multiplied with a weight."""
    kind = gemm_kind(weight, 512, conditions)
    return {GemmKind.FP8: torch.float8_e4m3fn, GemmKind.INT8: torch.int8}.get(
        kind, conditions.dtype
    )


def table(
    conditions: GemmConditions, rows: tuple[int, ...] = (1, 16, 64, 512)
) -> Iterator[tuple[str, list[GemmKind]]]:
    """Yields for each kind of weight its format, and the implementations for these numbers of
    rows."""
    for weight in _of_each_kind(conditions.dtype):
        yield weight.format, [gemm_kind(weight, num, conditions) for num in rows]


def _in_8_bits(weight: W4Weight | W8Weight, conditions: GemmConditions) -> GemmKind | None:
    """FP8 where the GPU has such products, or int8, for weights with one scale a row.

    torch's products have results in bfloat16 only, and take dimensions that are multiples of 16.
    """
    if isinstance(weight, W4Weight) or weight.group is not None:
        return None
    if not _may_round(weight, conditions.activations) or any(size % 16 for size in weight.shape):
        return None
    if not weight.is_fp8:
        return GemmKind.INT8
    has_fp8 = conditions.gpu.arch >= 89 and conditions.dtype == torch.bfloat16
    return GemmKind.FP8 if has_fp8 else None


def _may_round(weight: W8Weight, activations: str) -> bool:
    return weight.rounds_activations if activations == "auto" else activations == "int8"


def _of_each_kind(dtype: torch.dtype) -> Iterator[DeviceWeight]:
    """Yields a weight without memory of each kind that ``packing.py`` makes."""
    n = k = 4096

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    yield DenseWeight(empty(n, k, dtype=dtype))
    for group in (16, 32, 64, 128):
        scales = empty(k // group, n, dtype=torch.float16)
        yield W4Weight(empty(k // 8, n, dtype=torch.int32), scales, None, group, (n, k))
    for group in (16, 32, 128):
        scales = empty(k // group, n, dtype=torch.float16)
        yield W8Weight(empty(n, k, dtype=torch.int8), scales, None, group)
    scales = empty(k // 128, n, dtype=torch.float32)
    yield W8Weight(empty(n, k, dtype=torch.float8_e4m3fn), scales, None, 128)
    by_rows = empty(1, n, dtype=torch.float32)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for rounds in (False, True):
            yield W8Weight(empty(n, k, dtype=dtype), by_rows, None, None, rounds)
