"""Quantization of float32 rows to the types of GGUF files: the inverse of gguf_formats.py.

What a type is given for its name::

    Q4_0 Q5_0 Q8_0 IQ4_NL         x = d * L             in blocks of 32
    Q4_1 Q5_1                     x = d * q + m
    Q3_K Q6_K IQ4_XS              x = d * s * L         in super-blocks of 256
    Q2_K Q4_K Q5_K                x = d * s * q - e * t

Without importance Q4_0 to Q8_0 have the bytes that ggml gives them (``ggml-quants.c``). All else is
found by the searches of gguf_search.py, which weight the squared error of each value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_search import (
    IntegerLevels, TableLevels, extreme, fit_affine, fit_symmetric, half, quotient,
)

_CHUNK = 1 << 16
_ONE = IntegerLevels(1, 1)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
S = {
 GGMLType.Q3_K: (16, IntegerLevels(-4, 3), IntegerLevels(-32, 31)),
 GGMLType.Q6_K: (16, IntegerLevels(-32, 31), IntegerLevels(-128, 127)),
 GGMLType.IQ4_XS: (32, TableLevels(IQ4), IntegerLevels(-32, 31)),
 GGMLType.IQ4_NL: (32, TableLevels(IQ4), _ONE),
 GGMLType.Q4_0: (32, IntegerLevels(-8, 7), _ONE),
 GGMLType.Q5_0: (32, IntegerLevels(-16, 15), _ONE),
 GGMLType.Q8_0: (32, IntegerLevels(-127, 127), _ONE),
}
A = {
 GGMLType.Q2_K: (16, 3, IntegerLevels(0, 15)),
 GGMLType.Q4_K: (32, 15, IntegerLevels(0, 63)),
 GGMLType.Q5_K: (32, 31, IntegerLevels(0, 63)),
 GGMLType.Q4_1: (32, 15, _ONE),
 GGMLType.Q5_1: (32, 31, _ONE),
}

def emulate(type, x, w):
    """proto: dequantized values"""
    n, K = x.shape
    out = torch.empty_like(x)
    rows = max(1, _CHUNK // K)
    B = block_shape(type)[0]
    for i in range(0, n, rows):
        c = x[i:i+rows]; cw = w[i:i+rows]
        V = (S.get(type) or A.get(type))[0]
        t = c.reshape(-1, B//V, V).permute(2,1,0).contiguous()
        tw = cw.reshape(-1, B//V, V).permute(2,1,0).contiguous()
        if type in S:
            f = fit_symmetric(t, tw, *S[type][1:])
            y = f.d*f.s*f.levels
        else:
            f = fit_affine(t, tw, *A[type][1:])
            y = f.d*f.s*f.q - f.e*f.t
        out[i:i+rows] = y.permute(2,1,0).reshape(c.shape)
    return out
