"""What kernels do to single values, whatever else they do: activation functions, rounding to codes.

All of it is in float32, and made of operations that the interpreter of Triton has as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest magnitude of each type of codes: a row is scaled so that this is its greatest.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """``gate`` (float32) through "silu", "gelu_tanh" or "gelu_erf"."""
    if ACTIVATION == "silu":
        share = _sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh x) / 2 is the sigmoid of 2 x.
        share = _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "gelu_erf")
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate * share


@triton.jit
def to_codes(values, scale, TYPE: tl.constexpr):
    """``values`` (float32) over ``scale``, rounded to ``TYPE``: int8, ties to even, or e4m3.

    A scale of 0 is that of nothing but zeros.
    """
    scaled = tl.math.div_rn(values, tl.where(scale > 0.0, scale, 1.0))
    if TYPE == tl.int8:
        magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
        scaled = (scaled + magic) - magic
    return scaled.to(TYPE)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x); below -80, where that is 0 for all purposes, what it is at -80."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))
