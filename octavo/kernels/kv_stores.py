"""Formats of the KV cache in plain torch, as the reference ops use them.

A :class:`Codec` encodes a head's vector into tensors and decodes it; a :class:`KVStore` has the
vectors of one layer. Formats with scales round as ``csrc/kv_codes.h`` does, so that the same
numbers become the same codes, and take as many bytes:

    int8   scale * (byte - 128)       a scale for each token and head; keys rotated
    fp8    scale * e4m3               a scale for each token and head; keys rotated
    int4   minimum + scale * nibble   both for each 32 dimensions, in bfloat16; keys rotated
    k8v4   keys of int8, values of int4

Keys are rotated by a Hadamard matrix, which spreads outliers. A vector that is not finite is
decoded to values that are not finite. The native kernels pad vectors with zeros, and so does
:class:`PaddedCodec`: scales and rotations include the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.kernels.cpu.layout import KV_NIBBLE_GROUP, padded_head

_TINY = 1e-30  # smaller scales count as 0: their reciprocal might not be finite


class StoredPart(NamedTuple):
    """One of the tensors that a vector is encoded into: its number of values and their type."""

    width: int
    dtype: torch.dtype


class Codec(Protocol):
    """Encoding of vectors [..., D]."""

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]: ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Encode vectors: a tensor [..., width] for each part."""
        ...

    def decode(self, *parts: Tensor) -> Tensor:
        """Decode vectors: float32, or the stored type if that is a float."""
        ...


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """Floats, rounded to a type."""

    dtype: torch.dtype

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        return (StoredPart(head_dim, self.dtype),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, *parts: Tensor) -> Tensor:
        return parts[0]


class Int8Codec:
    """Integers of 8 bits: 127ths of the largest magnitude."""

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        return StoredPart(head_dim, torch.uint8), StoredPart(1, torch.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        top = x.abs().amax(dim=-1, keepdim=True)
        units = torch.round(x * _quotient(127, top))
        # Divided by a tensor: a GPU would multiply by the reciprocal of a number.
        return (units + 128).to(torch.uint8), top / torch.full_like(top, 127)

    def decode(self, *parts: Tensor) -> Tensor:
        codes, scale = parts
        return scale * (codes.float() - 128)


class Fp8Codec:
    """Floats of 8 bits: e4m3, without infinities.

    They are coarse above a power of two, and fine below; so the largest magnitude is mapped to the
    one of ``_TOPS`` that leaves the least error.
    """

    _TOPS = (448, 288, 256, 240)

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        return StoredPart(head_dim, torch.uint8), StoredPart(1, torch.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        top = x.abs().amax(dim=-1, keepdim=True)
        tried = [self._encode(x, top, to) for to in self._TOPS]
        errors = torch.stack([(self.decode(*t) - x).double().square().sum(-1) for t in tried])
        best = errors.argmin(dim=0)[..., None]
        codes, scale = tried[0]
        for index, (other_codes, other_scale) in enumerate(tried[1:], start=1):
            codes = torch.where(best == index, other_codes, codes)
            scale = torch.where(best == index, other_scale, scale)
        return codes, scale

    def decode(self, *parts: Tensor) -> Tensor:
        codes, scale = parts
        return scale * codes.view(torch.float8_e4m3fn).float()

    @staticmethod
    def _encode(x: Tensor, top: Tensor, to: int) -> tuple[Tensor, Tensor]:
        rounded = (x * _quotient(to, top)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8), top / torch.full_like(top, to)


class Int4Codec:
    """Integers of 4 bits: 15ths of the range between the least and the largest of 32 numbers.

    Codes are two to a byte, the first half of a vector in the low bits. The minimum is rounded to
    bfloat16, and the scale covers the range above it: so the error of a number is at most half a
    scale and that rounding.
    """

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        groups = -(-head_dim // KV_NIBBLE_GROUP)
        scales = StoredPart(groups, torch.bfloat16)
        return StoredPart(head_dim // 2, torch.uint8), scales, scales

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        coded = [self._encode(group) for group in x.float().split(KV_NIBBLE_GROUP, dim=-1)]
        codes, scales, minima = (torch.cat(parts, dim=-1) for parts in zip(*coded, strict=True))
        low, high = codes.chunk(2, dim=-1)
        return low | high << 4, scales, minima

    def decode(self, *parts: Tensor) -> Tensor:
        packed, scales, minima = parts
        codes = torch.cat([packed & 15, packed >> 4], dim=-1).float()
        group = torch.arange(codes.shape[-1], device=codes.device) // KV_NIBBLE_GROUP
        return minima.float()[..., group] + scales.float()[..., group] * codes

    @staticmethod
    def _encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        minimum = x.amin(dim=-1, keepdim=True).bfloat16()
        base = minimum.float()
        scale = ((x.amax(dim=-1, keepdim=True) - base) / 15).bfloat16()
        units = (x - base) * _quotient(1, scale.float())
        return torch.round(units.clamp(0, 15)).to(torch.uint8), scale, minimum


@dataclass(frozen=True, slots=True)
class HadamardCodec:
    """A codec of vectors that are rotated by a Hadamard matrix first, which spreads a few large
    dimensions evenly over all."""

    codec: Codec

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        return self.codec.parts(head_dim)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.codec.encode(hadamard_rotate(x.float()))

    def decode(self, *parts: Tensor) -> Tensor:
        x = self.codec.decode(*parts)
        return hadamard_rotate(x) / _rotated_together(x.shape[-1])


@dataclass(frozen=True, slots=True)
class PaddedCodec:
    """A codec of vectors of ``size`` numbers that are padded with zeros to
    ``padded_head(size)``."""

    codec: Codec
    size: int

    def parts(self, head_dim: int) -> tuple[StoredPart, ...]:
        return self.codec.parts(padded_head(head_dim))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        zeros = padded_head(self.size) - self.size
        return self.codec.encode(torch.nn.functional.pad(x, (0, zeros)))

    def decode(self, *parts: Tensor) -> Tensor:
        return self.codec.decode(*parts)[..., : self.size]


def hadamard_rotate(x: Tensor) -> Tensor:
    """Multiply x [..., D] with a Hadamard matrix of the largest power of two that divides D.

    The matrix is not normalized: applied twice, it multiplies x by its size. Sums are in the order
    of the native kernels, so with the same rounding.
    """
    together = _rotated_together(x.shape[-1])
    apart = min(together, 16)
    signs = _hadamard(apart).to(x.device)
    terms = x.unflatten(-1, (-1, apart))
    total = torch.zeros_like(terms)
    for i in range(apart):
        total = total + terms[..., i : i + 1] * signs[i]
    x = total.flatten(-2)
    while apart < together:
        a, b = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        apart *= 2
    return x


def _rotated_together(head_dim: int) -> int:
    return head_dim & -head_dim


def _hadamard(size: int) -> Tensor:
    signs = torch.ones(1, 1)
    while len(signs) < size:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), signs)
    return signs


def _quotient(of: float, by: Tensor) -> Tensor:
    """``of / by``, and 0 where ``by`` is too small to divide by.

    Divides two tensors: torch multiplies a number by the reciprocal of a tensor, which rounds
    twice.
    """
    return torch.where(by > _TINY, torch.full_like(by, of) / by, 0.0)


# Codecs of keys and of values, by the name of the KV cache's type in results.
CODECS: dict[str, tuple[Codec, Codec]] = {
    "float32": (FloatCodec(torch.float32), FloatCodec(torch.float32)),
    "bfloat16": (FloatCodec(torch.bfloat16), FloatCodec(torch.bfloat16)),
    "float16": (FloatCodec(torch.float16), FloatCodec(torch.float16)),
    "int8": (HadamardCodec(Int8Codec()), Int8Codec()),
    "fp8": (HadamardCodec(Fp8Codec()), Fp8Codec()),
    "int4": (HadamardCodec(Int4Codec()), Int4Codec()),
    "k8v4": (HadamardCodec(Int8Codec()), Int4Codec()),
}


def codecs_of(dtype: str, is_latent: bool = False) -> tuple[Codec, Codec]:
    """Codecs of the two vectors that a layer caches for a token and head: its key and its value, or
    its latent vector and the rotated key beside it.

    Latent vectors have no Hadamard rotation: they were normed, and the key has a scale of its own.
    """
    keys, values = CODECS[dtype]
    return (values, values) if is_latent else (keys, values)


def padded_codec(codec: Codec, head_dim: int) -> Codec:
    """The codec of heads of this size with the padding of the native kernels."""
    return codec if padded_head(head_dim) == head_dim else PaddedCodec(codec, head_dim)


class Vectors(Protocol):
    """The cached vectors of one layer, for attention to read."""

    @property
    def num_heads(self) -> int: ...

    def read(self, rows: Tensor) -> Tensor:
        """Vectors [R, D] of rows (int64 [R]), ``slot * Hk + head`` each."""
        ...


@dataclass(frozen=True, slots=True)
class KVStore:
    """The keys, or the values, of one layer. ``parts`` are [num_blocks, block_size, Hk, width]."""

    codec: Codec
    parts: Sequence[Tensor]

    @property
    def num_heads(self) -> int:
        return self.parts[0].shape[2]

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Write x [T, Hk, D] to slots (int64 [T]), ``block_id * block_size + offset`` each."""
        for memory, part in zip(self.parts, self.codec.encode(x), strict=True):
            memory.view(-1, *memory.shape[2:]).index_copy_(0, slots, part)

    def read(self, rows: Tensor) -> Tensor:
        return self.codec.decode(
            *(memory.view(-1, memory.shape[-1]).index_select(0, rows) for memory in self.parts)
        )


@dataclass(frozen=True, slots=True)
class JoinedStore:
    """Vectors that are cached in several stores, concatenated when they are read."""

    stores: Sequence[KVStore]

    @property
    def num_heads(self) -> int:
        return self.stores[0].num_heads

    def read(self, rows: Tensor) -> Tensor:
        return torch.cat([store.read(rows) for store in self.stores], dim=-1)
