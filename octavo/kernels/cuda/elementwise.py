"""Element-wise functions of kernels: activations, and rounding to codes.

All of them are in float32, and made of operations that Triton's interpreter has as well.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.cuda.kv_codes import e4m3
from octavo.kernels.routing import SWIGLU_ALPHA as _SWIGLU_ALPHA
from octavo.kernels.routing import SWIGLU_LIMIT as _SWIGLU_LIMIT

SWIGLU_ALPHA, SWIGLU_LIMIT = tl.constexpr(_SWIGLU_ALPHA), tl.constexpr(_SWIGLU_LIMIT)


class CodeType(NamedTuple):
    """A type of codes of a byte: its name in kernels, and its largest code, which a row's largest
    magnitude becomes."""

    name: str
    largest: float


CODE_TYPES = {torch.int8: CodeType("s8", 127.0), torch.float8_e4m3fn: CodeType("e4m3", 448.0)}


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """Apply "silu", "gelu_tanh", "gelu_erf" or "relu" to ``gate`` (float32)."""
    if ACTIVATION == "silu":
        share = sigmoid(gate)
    elif ACTIVATION == "relu":
        share = tl.where(gate < 0.0, 0.0, 1.0)  # a NaN stays one
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh x) / 2 is the sigmoid of 2 x.
        share = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "gelu_erf")
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate * share


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, in float32; or gpt-oss's "clamped_swiglu" of both."""
    if ACTIVATION == "clamped_swiglu":
        # No minimum and maximum, which would drop a NaN.
        gate = tl.where(gate > SWIGLU_LIMIT, SWIGLU_LIMIT, gate)
        up = tl.where(up > SWIGLU_LIMIT, SWIGLU_LIMIT, up)
        up = tl.where(up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, up)
        made = gate * sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)
    else:
        made = activate(gate, ACTIVATION) * up
    return made


@triton.jit
def scale_of(greatest, damage, LARGEST: tl.constexpr):
    """Scale of a row's codes, from its largest magnitudes [N], and sums [N] of 0 times each value.

    The sums are NaN if a value is not finite, which a maximum would leave out.
    """
    return tl.div_rn(tl.max(greatest, 0) + tl.sum(damage, 0), LARGEST)


@triton.jit
def to_codes(values, scale, TYPE: tl.constexpr):
    """Codes of ``values`` (float32) over ``scale``, "s8" or "e4m3", rounded to nearest even, as
    uint8.

    A scale of 0 is that of a row of zeros.
    """
    scaled = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0))
    if TYPE == "e4m3":
        codes = e4m3(scaled)
    else:
        tl.static_assert(TYPE == "s8")
        # Adding and subtracting 1.5 * 2^23 rounds to an integer.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def sigmoid(x):
    """Sigmoid, 1 / (1 + e^-x); below -80, where it is practically 0, its value at -80."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))
