"""How many bytes the native kernels keep things in, without a library and without torch.

The kernels have the last word: ``oct_packed_bytes``, ``oct_gguf_format`` and ``oct_kv_chunk_bytes``
say the same of a library that is loaded, and tests hold the two together. This is for those who
only plan.
"""

from __future__ import annotations

from octavo.kernels.cpu import abi
from octavo.quantization.ggml_types import GGMLType

_TILE = 16  # outputs that lie together; see csrc/pack.h
_LINE = 64
KV_CHUNK = 16  # tokens whose keys lie together; see csrc/attention.h

# What products with weights of a packed format are computed in.
ARITHMETIC = {
    abi.OCT_W4S: "int4 x int8",
    abi.OCT_W4A: "int4 x int8",
    abi.OCT_W8S: "int8",
    abi.OCT_W8A: "int8",
    abi.OCT_BF16: "bfloat16",
    abi.OCT_F32: "float32",
}

# What a tensor of a file becomes: the format, and the inputs of a group.
PACKED_FORMATS = {
    GGMLType.F32: (abi.OCT_F32, 0),
    GGMLType.F16: (abi.OCT_F32, 0),
    GGMLType.BF16: (abi.OCT_BF16, 0),
    GGMLType.Q4_0: (abi.OCT_W4S, 32),
    GGMLType.Q4_1: (abi.OCT_W4A, 32),
    GGMLType.Q5_0: (abi.OCT_W8S, 32),
    GGMLType.Q5_1: (abi.OCT_W8A, 32),
    GGMLType.Q8_0: (abi.OCT_W8S, 32),
    GGMLType.Q2_K: (abi.OCT_W8A, 16),
    GGMLType.Q3_K: (abi.OCT_W8S, 16),
    GGMLType.Q4_K: (abi.OCT_W4A, 32),
    GGMLType.Q5_K: (abi.OCT_W8A, 32),
    GGMLType.Q6_K: (abi.OCT_W8S, 16),
    GGMLType.IQ4_NL: (abi.OCT_W8S, 32),
    GGMLType.IQ4_XS: (abi.OCT_W8S, 32),
}

# The formats of the KV cache, as it is called in results.
KV_FORMATS = {
    "bfloat16": abi.OCT_KV_BF16,
    "float32": abi.OCT_KV_F32,
    "int8": abi.OCT_KV_INT8,
}


def packed_bytes(format: int, n: int, k: int, group: int) -> int:
    """Bytes of a matrix of ``n`` outputs and ``k`` inputs."""
    tiles = -(-n // _TILE)
    if format in (abi.OCT_BF16, abi.OCT_F32):
        unit, value = (16, 2) if format == abi.OCT_BF16 else (8, 4)
        return tiles * _TILE * -(-k // unit) * unit * value
    groups = -(-k // group)
    integers = groups * group * _TILE
    if format in (abi.OCT_W4S, abi.OCT_W4A):
        integers //= 2
    has_min = format in (abi.OCT_W4A, abi.OCT_W8A)
    lines_of_scales = groups if has_min else -(-groups // 2)
    return tiles * (integers + lines_of_scales * _LINE)


def kv_chunk_bytes(format: int, head_dim: int) -> int:
    """Bytes of the keys and values of ``KV_CHUNK`` tokens, of one head."""
    values = 2 * KV_CHUNK * head_dim
    if format == abi.OCT_KV_INT8:
        return values + 2 * KV_CHUNK * 4  # a scale for each key and each value
    return values * (2 if format == abi.OCT_KV_BF16 else 4)
