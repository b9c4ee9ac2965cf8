"""By what a product is computed, for each kind of weight and number of rows: decided here alone."""

from __future__ import annotations

from collections.abc import Iterator
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


class Way(Enum):
    """What computes a product; norms, activations and sums of the residual stream go with it, or
    are launches of their own."""

    FUSED = "one Triton kernel, with norm, activation and residual"
    TILES = "the same kernel in tiles of 32 rows, however many there are"
    GEMM = "cuBLAS; norm and activation by Triton"
    EXPANDED = "Triton to 16 bits, then cuBLAS; norm and activation by Triton"
    FP8 = "activations to FP8 by rows, torch._scaled_mm"
    INT8 = "activations to int8 by rows, torch._int_mm, scales by Triton"
    PARTS = "each of its parts by its own"


def way_of(
    weight: DeviceWeight,
    num_rows: int,
    dtype: torch.dtype,
    gpu: Gpu,
    invariant: bool = False,
) -> Way:
    """How ``num_rows`` rows of ``dtype`` are multiplied with a weight.

    ``invariant``: in a way in which a row's bits are the same whatever others there are.
    """
    if isinstance(weight, JoinedWeight):
        return Way.PARTS
    if invariant:
        return Way.TILES
    if isinstance(weight, DenseWeight):
        return Way.FUSED if num_rows <= FEW_DENSE_ROWS else Way.GEMM
    assert isinstance(weight, W4Weight | W8Weight)
    if num_rows >= CODED_ACTIVATION_ROWS and (way := _in_8_bits(weight, dtype, gpu)) is not None:
        return way
    return Way.FUSED if num_rows <= FEW_CODED_ROWS else Way.EXPANDED


def table(
    gpu: Gpu,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, ...] = (1, 16, 64, 512),
    invariant: bool = False,
) -> Iterator[tuple[str, list[Way]]]:
    """For each kind of weight its format, and how it is multiplied with so many rows."""
    for weight in _of_each_kind(dtype):
        yield weight.format, [way_of(weight, num, dtype, gpu, invariant) for num in rows]


def _in_8_bits(weight: W4Weight | W8Weight, dtype: torch.dtype, gpu: Gpu) -> Way | None:
    """FP8 where the GPU multiplies it, and int8, of rows with one scale each: the products of
    torch have results in bfloat16 alone, and take dimensions that are multiples of 16."""
    if isinstance(weight, W4Weight) or weight.group is not None:
        return None
    if any(size % 16 for size in weight.shape):
        return None
    if not weight.is_fp8:
        return Way.INT8
    return Way.FP8 if gpu.arch >= 89 and dtype == torch.bfloat16 else None


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
    by_rows = empty(1, n, dtype=torch.float32)
    yield W8Weight(empty(n, k, dtype=torch.int8), by_rows, None, None)
    scales = empty(k // 128, n, dtype=torch.float32)
    yield W8Weight(empty(n, k, dtype=torch.float8_e4m3fn), scales, None, 128)
    yield W8Weight(empty(n, k, dtype=torch.float8_e4m3fn), by_rows, None, None)
