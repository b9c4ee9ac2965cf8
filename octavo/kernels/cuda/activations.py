"""Activation functions: of gates times ups, or alone; and gates of attention and of shared
experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.elementwise import CODE_TYPES, activate, scale_of, sigmoid, to_codes

_BLOCK = 1024  # values that four warps process at a time


def activation_mul(
    gate_up: Tensor, out: Tensor, activation: str, *, scales: Tensor | None = None
) -> None:
    """Compute out = activation(gate) * up, in float32, rounded once at the end.

    Args:
        gate_up: [T, 2 F] in any float type, the gates of a row before its ups.
        out: [T, F]; of int8 or float8_e4m3fn if there are ``scales``, else of any float type.
        activation: "silu", "gelu_tanh" or "gelu_erf", as ``kernels/fused_ops.py`` calls them.
        scales: float32 [T]. ``out`` times these is the product, as in ``norms.rmsnorm``.
    """
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width), (gate_up.shape, out.shape)
    assert (scales is not None) == (out.dtype in CODE_TYPES), out.dtype
    gate, up = gate_up.chunk(2, dim=1)
    if scales is None:
        activation_mul_apart(gate, up, out, activation)
    elif num_rows:
        assert gate_up.stride(1) == out.stride(1) == 1
        _mul_to_codes[(num_rows,)](
            gate, gate.stride(0), up, up.stride(0), out.view(torch.uint8), out.stride(0), scales,
            width, activation, *CODE_TYPES[out.dtype], 4 * _BLOCK, num_warps=16,
        )  # fmt: skip


def activation_mul_apart(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Compute out = activation(gate) * up for gates and ups [T, F] in two tensors, as floats."""
    num_rows, width = out.shape
    assert gate.shape == up.shape == out.shape, (gate.shape, up.shape, out.shape)
    assert gate.stride(1) == up.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return
    _mul[(num_rows, triton.cdiv(width, _BLOCK))](
        gate, gate.stride(0), up, up.stride(0), out, out.stride(0),
        width, activation, _BLOCK, num_warps=4,
    )  # fmt: skip


def activation_alone(x: Tensor, out: Tensor, activation: str) -> None:
    """Compute out [T, F] = activation(x), in float32, rounded once; also "relu"."""
    num_rows, width = out.shape
    assert x.shape == out.shape and x.stride(1) == out.stride(1) == 1
    if num_rows:
        _alone[(num_rows, triton.cdiv(width, _BLOCK))](
            x, x.stride(0), out, out.stride(0), width, activation, _BLOCK, num_warps=4
        )


def sigmoid_mul(gate: Tensor, x: Tensor, out: Tensor) -> None:
    """Compute out [T, F] = sigmoid(gate) * x, with gates [T, F] or [T, 1]."""
    num_rows, width = out.shape
    assert x.shape == out.shape and gate.shape[1] in (1, width)
    assert gate.stride(1) == x.stride(1) == out.stride(1) == 1
    if num_rows:
        _sigmoid_mul[(num_rows, triton.cdiv(width, _BLOCK))](
            gate, gate.stride(0), x, x.stride(0), out, out.stride(0), width,
            gate.shape[1] == 1, _BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _alone(x, x_stride, out, out_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < width
    values = tl.load(x + row * x_stride + columns, mask=exists, other=0.0).to(tl.float32)
    place = out + row * out_stride + columns
    tl.store(place, activate(values, ACTIVATION).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _sigmoid_mul(
    gate,
    gate_stride,
    x,
    x_stride,
    out,
    out_stride,
    width,
    OF_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < width
    gates = tl.load(
        gate + row * gate_stride + (columns * 0 if OF_ROW else columns), mask=exists, other=0.0
    )
    values = tl.load(x + row * x_stride + columns, mask=exists, other=0.0).to(tl.float32)
    values *= sigmoid(gates.to(tl.float32))
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _mul(
    gate,
    gate_stride,
    up,
    up_stride,
    out,
    out_stride,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate, up = gate + row * gate_stride, up + row * up_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _product(gate, up, width, columns, ACTIVATION)
    place = out + row * out_stride + columns
    tl.store(place, values.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _mul_to_codes(
    gate,
    gate_stride,
    up,
    up_stride,
    out,
    out_stride,
    scales,
    width,
    ACTIVATION: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program handles a row, and reads it twice: first for its largest magnitude, then from the
    cache."""
    row = tl.program_id(0).to(tl.int64)
    gate, up = gate + row * gate_stride, up + row * up_stride
    greatest = tl.zeros([BLOCK], tl.float32)
    damage = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _product(gate, up, width, columns, ACTIVATION)
        greatest = tl.maximum(greatest, tl.abs(values))
        damage += values * 0.0
    scale = scale_of(greatest, damage, LARGEST)
    tl.store(scales + row, scale)
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _product(gate, up, width, columns, ACTIVATION)
        codes = to_codes(values, scale, CODE)
        tl.store(out + row * out_stride + columns, codes, mask=columns < width)


@triton.jit
def _product(gate, up, width, columns, ACTIVATION: tl.constexpr):
    """activation(gate) * up of these columns of a row: float32, 0 beyond its end."""
    exists = columns < width
    gates = tl.load(gate + columns, mask=exists, other=0.0).to(tl.float32)
    ups = tl.load(up + columns, mask=exists, other=0.0).to(tl.float32)
    return activate(gates, ACTIVATION) * ups
