"""By what a product is computed, for each kind of weight and number of rows: decided here alone."""

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

FEW_DENSE_ROWS = 16  # what an instruction that multiplies matrices takes anyway
FEW_CODED_ROWS = 64  # more are worth a copy of the weight
CODED_ACTIVATION_ROWS = 32  # from which products in 8 bits are worth the rounding of activations


class GemmKind(Enum):
    """What computes a product; norms, activations and sums of the residual stream go with it, or
    are launches of their own."""

    FUSED = "one Triton kernel, with norm, activation and residual"
    TILES = "the same kernel in tiles of 32 rows, however many there are"
    GEMM = "cuBLAS; norm and activation by Triton"
    EXPANDED = "Triton to 16 bits, then cuBLAS; norm and activation by Triton"
    FP8 = "activations to FP8 by rows, torch._scaled_mm"
    INT8 = "activations to int8 by rows, torch._int_mm, scales by Triton"
    PARTS = "each of its parts by its own"


@dataclass(frozen=True, slots=True)
class GemmConditions:
    """What decides beside the weight and the rows.

    Args:
        dtype: of activations.
        invariant: a row has the same bits whatever other rows there are.
        activations: as in ``EngineArgs``: "auto" rounds those to 8 bits that meet a weight whose
            checkpoint was made for that, "int8" those of every weight that is multiplied so,
            "int16" none.
    """

    gpu: Gpu
    dtype: torch.dtype = torch.bfloat16
    invariant: bool = False
    activations: str = "auto"


def gemm_kind(weight: DeviceWeight, num_rows: int, conditions: GemmConditions) -> GemmKind:
    """How so many rows are multiplied with a weight."""
    if isinstance(weight, JoinedWeight):
        return GemmKind.PARTS
    if conditions.invariant:
        return GemmKind.TILES
    if isinstance(weight, DenseWeight):
        return GemmKind.FUSED if num_rows <= FEW_DENSE_ROWS else GemmKind.GEMM
    assert isinstance(weight, W4Weight | W8Weight)
    in_8_bits = _in_8_bits(weight, conditions)
    if in_8_bits is not None and num_rows >= CODED_ACTIVATION_ROWS:
        return in_8_bits
    return GemmKind.FUSED if num_rows <= _few_rows(weight) else GemmKind.EXPANDED


def _few_rows(weight: W4Weight | W8Weight) -> int:
    """Codes of a byte that do not begin at 16 bytes are read one by one: with many rows, that takes
    more registers than there are."""
    is_odd = isinstance(weight, W8Weight) and weight.shape[1] % 16
    return FEW_DENSE_ROWS if is_odd else FEW_CODED_ROWS


def multiplied_as(weight: DeviceWeight, conditions: GemmConditions) -> torch.dtype:
    """The type in which the rows of a long prompt are multiplied with a weight."""
    kind = gemm_kind(weight, 512, conditions)
    return {GemmKind.FP8: torch.float8_e4m3fn, GemmKind.INT8: torch.int8}.get(
        kind, conditions.dtype
    )


def table(
    conditions: GemmConditions, rows: tuple[int, ...] = (1, 16, 64, 512)
) -> Iterator[tuple[str, list[GemmKind]]]:
    """For each kind of weight its format, and how it is multiplied with so many rows."""
    for weight in _of_each_kind(conditions.dtype):
        yield weight.format, [gemm_kind(weight, num, conditions) for num in rows]


def _in_8_bits(weight: W4Weight | W8Weight, conditions: GemmConditions) -> GemmKind | None:
    """FP8 where the GPU multiplies it, and int8, of rows with one scale each: the products of
    torch have results in bfloat16 alone, and take dimensions that are multiples of 16."""
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
    """Weights of no memory, some of each kind that ``packing.py`` makes."""
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
