"""Sizes of what the native kernels store, without a library and without torch, for planning.

The kernels define them: ``oct_packed_bytes``, ``oct_gguf_format``, ``oct_experts_bytes`` and
``oct_kv_chunk_bytes`` return the same numbers, and tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kernels.cpu import abi
from octavo.quantization.ggml_types import GGMLType

TILE = 16  # outputs that lie together; see csrc/pack.h
_LINE = 64
_UNIT = 32  # inputs whose integers lie together
_BLOCK = 256  # inputs of a block of K formats
KV_CHUNK = 16  # tokens whose keys lie together; see csrc/attention.h
_EXPERTS_BYTES = 32 << 20  # of experts' rows in a chunk, which has at least _FEW_ROWS tokens
_FEW_ROWS = 8
KV_NIBBLE_GROUP = 32  # dimensions that share a scale in KV of 4 bits
_HEAD_UNIT = 16  # heads in the KV cache are padded to a multiple of it
MAX_HEAD_SIZE = 512


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a packed integer format; see `traits_of` in csrc/pack.h."""

    bits: int
    has_min: bool = False
    nested_group: int = 0  # inputs that share an int8 scale: of K formats
    own_groups: tuple[int, ...] = (_UNIT,)  # of W formats
    arithmetic: str = "int8"  # what products are computed in

    @property
    def groups(self) -> tuple[int, ...]:
        """Possible numbers of inputs that share a scale."""
        return (self.nested_group,) if self.nested_group else self.own_groups


_NIBBLES = "int4 x int8"
_LONG, _SHORT = (32, 64, 128), (16, 32)
INTEGER_FORMATS = {
    abi.OCT_W2S: Traits(2, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W2A: Traits(2, has_min=True, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W3S: Traits(3, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W3A: Traits(3, has_min=True, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W4S: Traits(4, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W4A: Traits(4, has_min=True, own_groups=_LONG, arithmetic=_NIBBLES),
    abi.OCT_W8S: Traits(8, own_groups=_LONG),
    abi.OCT_W8A: Traits(8, has_min=True, own_groups=_LONG),
    abi.OCT_W5S: Traits(5),
    abi.OCT_W5A: Traits(5, has_min=True),
    abi.OCT_W4N: Traits(4),
    abi.OCT_W4F: Traits(4, own_groups=_SHORT),
    abi.OCT_K2A: Traits(2, has_min=True, nested_group=16, arithmetic=_NIBBLES),
    abi.OCT_K3S: Traits(3, nested_group=16, arithmetic=_NIBBLES),
    abi.OCT_K4A: Traits(4, has_min=True, nested_group=32, arithmetic=_NIBBLES),
    abi.OCT_K5A: Traits(5, has_min=True, nested_group=32),
    abi.OCT_K6S: Traits(6, nested_group=16),
    abi.OCT_K4N: Traits(4, nested_group=32),
}
# Codes of floats: bits, and the inputs that share a float32 scale.
CODE_FORMATS = {abi.OCT_NF4: (4, 64), abi.OCT_FP4: (4, 64), abi.OCT_E4M3: (8, 128)}
# Bytes of a value, and the number that inputs are padded to a multiple of.
FLOAT_FORMATS = {abi.OCT_BF16: (2, 16), abi.OCT_F16: (2, 16), abi.OCT_F32: (4, 8)}

# Arithmetic of products with weights of a packed format.
ARITHMETIC = {format: traits.arithmetic for format, traits in INTEGER_FORMATS.items()} | {
    abi.OCT_BF16: "bfloat16",
    abi.OCT_F16: "float32",
    abi.OCT_F32: "float32",
    abi.OCT_NF4: "float32",
    abi.OCT_FP4: "float32",
    abi.OCT_E4M3: "float32",
}

# Packed form of a file's tensor: the format, and the inputs of a group.
PACKED_FORMATS = {
    GGMLType.F32: (abi.OCT_F32, 0),
    GGMLType.F16: (abi.OCT_F16, 0),
    GGMLType.BF16: (abi.OCT_BF16, 0),
    GGMLType.Q4_0: (abi.OCT_W4S, 32),
    GGMLType.Q4_1: (abi.OCT_W4A, 32),
    GGMLType.Q5_0: (abi.OCT_W5S, 32),
    GGMLType.Q5_1: (abi.OCT_W5A, 32),
    GGMLType.Q8_0: (abi.OCT_W8S, 32),
    GGMLType.Q2_K: (abi.OCT_K2A, 16),
    GGMLType.Q3_K: (abi.OCT_K3S, 16),
    GGMLType.Q4_K: (abi.OCT_K4A, 32),
    GGMLType.Q5_K: (abi.OCT_K5A, 32),
    GGMLType.Q6_K: (abi.OCT_K6S, 16),
    GGMLType.IQ4_NL: (abi.OCT_W4N, 32),
    GGMLType.IQ4_XS: (abi.OCT_K4N, 32),
    GGMLType.MXFP4: (abi.OCT_W4F, 32),
}


def _coded_in_bytes(head_dim: int) -> int:
    return head_dim + 4  # a float32 scale


def _coded_in_nibbles(head_dim: int) -> int:
    groups = -(-head_dim // KV_NIBBLE_GROUP)
    return head_dim // 2 + groups * 4  # a scale and a minimum in bfloat16


# Bytes of a key and of a value, by their dimensions, for each type of the cache.
_KV_VECTORS: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "bfloat16": (lambda dim: 2 * dim, lambda dim: 2 * dim),
    "float16": (lambda dim: 2 * dim, lambda dim: 2 * dim),
    "float32": (lambda dim: 4 * dim, lambda dim: 4 * dim),
    "int8": (_coded_in_bytes, _coded_in_bytes),
    "fp8": (_coded_in_bytes, _coded_in_bytes),
    "int4": (_coded_in_nibbles, _coded_in_nibbles),
    "k8v4": (_coded_in_bytes, _coded_in_nibbles),
}
NIBBLE_TYPES = "int4", "k8v4"  # two numbers in a byte
# Bytes of a vector that latent attention caches, by its dimensions.
LATENT_TYPES: dict[str, Callable[[int], int]] = {
    dtype: vectors[0] for dtype, vectors in _KV_VECTORS.items() if dtype not in NIBBLE_TYPES
}
# Formats of the native kernels.
KV_FORMATS = {
    "bfloat16": abi.OCT_KV_BF16,
    "float32": abi.OCT_KV_F32,
    "int8": abi.OCT_KV_INT8,
    "fp8": abi.OCT_KV_FP8,
    "int4": abi.OCT_KV_INT4,
    "k8v4": abi.OCT_KV_K8V4,
}


def packed_bytes(format: int, n: int, k: int, group: int) -> int:
    """Bytes of a matrix of ``n`` outputs and ``k`` inputs."""
    tiles = -(-n // TILE)
    if format in FLOAT_FORMATS:
        size, unit = FLOAT_FORMATS[format]
        return tiles * TILE * -(-k // unit) * unit * size
    if format in CODE_FORMATS:
        bits, group = CODE_FORMATS[format]
        return tiles * -(-k // group) * (group * TILE * bits // 8 + _LINE)
    traits = INTEGER_FORMATS[format]
    if traits.nested_group:
        return tiles * -(-k // _BLOCK) * _block_bytes(traits)
    whole = max(group, _UNIT)
    padded = -(-k // whole) * whole
    groups = padded // group
    lines_of_scales = groups if traits.has_min else -(-groups // 2)
    return tiles * (padded * TILE * traits.bits // 8 + lines_of_scales * _LINE)


def columns_bytes(k: int, is_reordered: bool) -> int:
    """Bytes behind a matrix for the inputs of its columns, if these are permuted."""
    return 4 * k if is_reordered else 0


def _block_bytes(traits: Traits) -> int:
    """Bytes of a block of a K format, in a tile."""
    scales = _BLOCK // traits.nested_group * TILE
    if traits.has_min and traits.bits > 2:  # with 2 bits, a byte holds a scale and a min
        scales *= 2
    return _LINE + scales + _BLOCK * TILE * traits.bits // 8


def experts_bytes(hidden: int, inner: int, top_k: int, tokens: int) -> int:
    """Maximal bytes that a step of ``tokens`` tokens keeps between the products of its experts; see
    ``csrc/experts.cpp``, which cuts long steps into chunks of tokens."""
    encoded = -(-max(hidden, inner) // _BLOCK) * _BLOCK
    row_bytes = 4 * (hidden + inner + 2 + encoded)
    chunk = max(_EXPERTS_BYTES // (row_bytes * top_k), _FEW_ROWS)
    return min(tokens, chunk) * top_k * row_bytes


def padded_head(head_dim: int) -> int:
    """Numbers that a KV cache stores for a head's key or value, including padding with zeros."""
    return -(-head_dim // _HEAD_UNIT) * _HEAD_UNIT


def kv_token_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of the key and the value of a token and head, at most: GPU kernels do not pad."""
    keys, values = _KV_VECTORS[dtype]
    size = padded_head(head_dim)
    return keys(size) + values(size)


def latent_row_bytes(dtype: str, rank: int, rope_dim: int) -> int:
    """Bytes that latent attention caches for a token: ``rank`` values, and ``rope_dim`` of a
    rotated key, each with a scale of its own if they are codes; in any kernels.

    ``dtype`` is one of LATENT_TYPES: a latent vector is key and value at once, which rules out
    some.
    """
    vector = LATENT_TYPES[dtype]
    return vector(rank) + vector(rope_dim)


def latent_weight_format(packed_format: int) -> int:
    """Format in which kernels keep the matrices of latents, for a weight of ``packed_format``: the
    same if that has no scales; otherwise float16, whose rounding is small beside the weight's own.
    """
    exact = abi.OCT_F32, abi.OCT_F16, abi.OCT_BF16
    return packed_format if packed_format in exact else abi.OCT_F16
