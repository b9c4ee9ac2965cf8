"""Bytes of a cached key or value, by the type of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil

from octavo.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VectorType:
    """Numbers of some bits, and what each group of them has beside: 0 is the whole vector."""

    bits: float
    group: int = 0
    group_bytes: float = 0.0

    def num_bytes(self, dim: int) -> float:
        groups = ceil(dim / (self.group or dim)) if dim else 0
        return dim * self.bits / 8 + groups * self.group_bytes


@dataclass(frozen=True, slots=True)
class KvType:
    name: str
    keys: VectorType
    values: VectorType

    def token_bytes(self, heads: int, key_dim: int, value_dim: int) -> float:
        """Bytes of one token in one layer."""
        return heads * (self.keys.num_bytes(key_dim) + self.values.num_bytes(value_dim))


def _same(name: str, vector: VectorType) -> KvType:
    return KvType(name, vector, vector)


_BYTE, _SCALED = VectorType(8), VectorType(8, 0, 4)
_NIBBLES = VectorType(4, 32, 4)  # a scale and a minimum in bfloat16
_TYPES = {
    type.name: type
    for type in (
        _same("float32", VectorType(32)),
        _same("float16", VectorType(16)),
        _same("bfloat16", VectorType(16)),
        _same("fp8", _BYTE),  # one scale for all
        _same("int8", VectorType(8, 0, 2)),  # one for each token and head
        _same("q8_0", VectorType(8, 32, 2)),
        _same("q5_1", VectorType(5, 32, 4)),
        _same("q5_0", VectorType(5, 32, 2)),
        _same("q4_1", VectorType(4, 32, 4)),
        _same("q4_0", VectorType(4, 32, 2)),
        _same("int4", _NIBBLES),
        KvType("k8v4", _SCALED, _NIBBLES),
        # As octavo's kernels keep them; see `octavo.kernels.cpu.layout`.
        _same("octavo-int8", _SCALED),
        _same("octavo-fp8", _SCALED),
    )
}
_ALIASES = {
    "auto": "bfloat16",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


def kv_types() -> tuple[KvType, ...]:
    """All that are known."""
    return tuple(_TYPES.values())


def kv_type(name: str) -> KvType:
    """Find a type by an engine's name for it; ConfigError, with the closest name, if there is
    none."""
    low = _ALIASES.get(name.lower(), name.lower())
    if low not in _TYPES:
        near = " or ".join(get_close_matches(low, _TYPES, 2)) or ", ".join(_TYPES)
        raise ConfigError(f"kv_cache_dtype {name!r:.80} is not known: do you mean {near}?")
    return _TYPES[low]
