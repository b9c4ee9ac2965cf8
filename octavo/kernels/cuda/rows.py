"""Checks of rows for NaN and infinity, and soft caps of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # values that four warps process at a time


def find_damage(x: Tensor, damaged: Tensor) -> None:
    """Set damaged (int32 [T]) to 1 where a row of x [T, K], of any float type, has a NaN or an
    infinity, else to 0."""
    num_rows, width = x.shape
    assert damaged.shape == (num_rows,) and x.stride(1) == 1, (x.shape, damaged.shape)
    if num_rows:
        _find_damage[(num_rows,)](x, x.stride(0), damaged, width, _BLOCK, num_warps=4)


def softcap(logits: Tensor, cap: float) -> None:
    """Compute cap * tanh(logits / cap), in place of logits [R, V] of any float type."""
    num_rows, width = logits.shape
    assert logits.stride(1) == 1
    if num_rows:
        grid = num_rows, triton.cdiv(width, _BLOCK)
        _softcap[grid](logits, logits.stride(0), width, cap, _BLOCK, num_warps=4)


@triton.jit
def _find_damage(x, x_stride, damaged, width, BLOCK: tl.constexpr):
    """The sum of a row is finite if and only if all of it is, short of overflow in float32."""
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0)
        sums += tl.abs(values.to(tl.float32))
    is_sound = tl.sum(sums, 0) < float("inf")
    tl.store(damaged + row, tl.where(is_sound, 0, 1))


@triton.jit
def _softcap(logits, stride, width, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, exists = logits + row * stride + columns, columns < width
    values = tl.load(places, mask=exists, other=0.0).to(tl.float32)
    x = 2 * values / cap
    x = tl.where(x > 80.0, 80.0, x)  # tanh is 1 there; a minimum would drop a NaN
    tanh = 1 - 2 / (tl.exp(x) + 1)
    tl.store(places, (cap * tanh).to(logits.dtype.element_ty), mask=exists)
