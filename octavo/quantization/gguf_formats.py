"""Dequantization of the tensor types of GGUF files to float32.

A quantized row of ``K`` values is ``K / values`` blocks, each of ``bytes`` bytes, back to back::

    row        |  block 0  |  block 1  | ...          block_shape(type) = (values, bytes)
    block      | scales ... packed integers ... |     layout: the docstring of each function below

Layouts and arithmetic are those of ggml (``ggml-common.h``, ``ggml-quants.c``); the tests compare
the bits with the ``gguf`` package. Every function here is plain torch and runs on any device. It
is called on the fly in the reference forward, so it works on all blocks at once, in few passes:
integers are unpacked as bytes, converted once into ``out``, and scaled there in place.

Products are exact: 11 significant bits of a float16 scale, at most 7 of a sub-block scale and 7 of
the integer, fit the 24 of a float32. So it does not matter for the bits in which order they are
multiplied, or whether a compiler fuses the last product with the addition that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from octavo.base.errors import UnsupportedModelError
from octavo.quantization.ggml_types import GGMLType, block_shape


def dequantize(type: GGMLType, data: Tensor, out: Tensor | None = None) -> Tensor:
    """Dequantize rows to float32, with the bits that ggml's reference code gives.

    Args:
        data: uint8 ``[..., row_bytes]``, on any device. Temporaries take about one byte per value,
            so chunks of rows should fit the cache together with ``out``.
        out: contiguous float32 ``[..., K]`` on the same device, which is filled and returned.

    Infinite and NaN scales give infinite and NaN values.

    Raises:
        UnsupportedModelError: octavo cannot read ``type``.
    """
    function = DEQUANTIZERS.get(type)
    if function is None:
        raise UnsupportedModelError(
            f"octavo cannot dequantize {type.name} tensors; use a file quantized as one of "
            + ", ".join(known.name for known in DEQUANTIZERS)
        )
    values, size = block_shape(type)
    assert data.dtype == torch.uint8 and data.shape[-1] % size == 0, (type, data.dtype, data.shape)
    shape = (*data.shape[:-1], data.shape[-1] // size * values)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=data.device)
    assert out.dtype == torch.float32 and out.shape == shape and out.is_contiguous()
    if data.storage_offset() % 4:  # views of wider types need their storage to be aligned
        data = data.clone()
    if out.numel():
        function(data.reshape(-1, size), out.view(-1, values))
    return out


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block: float32 [n, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _unpack(packed: Tensor, bits: int, group: int) -> Tensor:
    """Unpack the bit fields of bytes: uint8 [n, bytes] -> uint8 [n, bytes * 8 / bits].

    Byte ``i`` of each ``group`` bytes holds value ``i`` in its lowest bits, value ``group + i`` in
    the next ones, and so on; all formats of ggml with several values a byte are laid out like this.
    """
    packed = packed.contiguous().view(
        packed.shape[0], -1, group
    )  # contiguous bytes shift much faster
    fields = torch.stack([packed, *(packed >> shift for shift in range(bits, 8, bits))], dim=2)
    return fields.bitwise_and_((1 << bits) - 1).flatten(1)


def _float32(blocks: Tensor, out: Tensor) -> None:
    """f32 value"""
    out.copy_(blocks.view(torch.float32))


def _float16(blocks: Tensor, out: Tensor) -> None:
    """f16 value"""
    out.copy_(blocks.view(torch.float16))


def _bfloat16(blocks: Tensor, out: Tensor) -> None:
    """bf16 value"""
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | 16 B: values 0-15 in the low nibbles, 16-31 in the high |
    value = d * (q - 8)"""
    q = _unpack(blocks[:, 2:], 4, 16).sub_(8).view(torch.int8)
    out.copy_(q).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | m f16 | 16 B: nibbles as in Q4_0 |
    value = d * q + m"""
    q = _unpack(blocks[:, 4:], 4, 16)
    out.copy_(q).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack consecutive bits, bit ``k`` of byte ``i`` for value ``8 i + k``: [n, 4] -> 0 or 1
    [n, 32]."""
    spread = packed.long() * 0x0101010101010101  # every byte eight times; then bit k of copy k
    spread.bitwise_and_(-0x7FBFDFEFF7FBFDFF)  # 0x8040201008040201 as a signed number
    return spread.view(torch.uint8).clamp_(max=1)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | 4 B: fifth bits, bit i for value i | 16 B: low four bits as in Q4_0 |
    value = d * (q - 16)"""
    q = _unpack(blocks[:, 6:], 4, 16).add_(_fifth_bits(blocks[:, 2:6]), alpha=16)
    out.copy_(q.sub_(16).view(torch.int8)).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | m f16 | 4 B: fifth bits | 16 B: low four bits, both as in Q5_0 |
    value = d * q + m"""
    q = _unpack(blocks[:, 8:], 4, 16).add_(_fifth_bits(blocks[:, 4:8]), alpha=16)
    out.copy_(q).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | 32 x int8 |
    value = d * q"""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    """| 16 B: scale s (low nibble), min t (high) of 16 values | 2 x 32 B: 2 bits | d f16 | e f16 |
    value = d * s * q - e * t"""
    step = (blocks[:, :16] & 15).float().mul_(_half(blocks, 80))
    offset = (blocks[:, :16] >> 4).float().mul_(_half(blocks, 82))
    out.copy_(_unpack(blocks[:, 16:80], 2, 32))
    out.view(-1, 16, 16).mul_(step.unsqueeze(-1)).sub_(offset.unsqueeze(-1))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """| 32 B: third bits | 2 x 32 B: low 2 bits | 8 B, 4 B: low 4, high 2 bits of 16 s | d f16 |
    value = d * (s - 32) * (q - 4)"""
    scale = _unpack(blocks[:, 96:104], 4, 8).add_(_unpack(blocks[:, 104:108], 2, 4), alpha=16)
    step = scale.sub_(32).view(torch.int8).float().mul_(_half(blocks, 108))
    q = _unpack(blocks[:, 32:96], 2, 32).add_(_unpack(blocks[:, :32], 1, 32), alpha=4)
    out.copy_(q.sub_(4).view(torch.int8)).view(-1, 16, 16).mul_(step.unsqueeze(-1))


def _steps_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """``d * s`` and ``e * t`` of the 8 sub-blocks of Q4_K and Q5_K: float32 [n, 8, 1] each.

    Both formats begin | d f16 | e f16 | 4 B: s 0-3 | 4 B: t 0-3 | 4 B: s, t 4-7 |. The first eight
    bytes have six bits of numbers 0-3, and in their top two bits those of numbers 4-7, whose lower
    four bits are the nibbles of the last four bytes.
    """
    first, last = blocks[:, 4:12].reshape(-1, 2, 4), _unpack(blocks[:, 12:16], 4, 4).view(-1, 2, 4)
    numbers = torch.cat([first & 63, last.add_(first >> 6, alpha=16)], dim=2).float()
    step, offset = numbers[:, 0].mul_(_half(blocks, 0)), numbers[:, 1].mul_(_half(blocks, 2))
    return step.unsqueeze(-1), offset.unsqueeze(-1)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | e f16 | 12 B: s, t of 32 values, see above | 4 x 32 B: nibbles |
    value = d * s * q - e * t"""
    step, offset = _steps_and_offsets(blocks)
    q = _unpack(blocks[:, 16:], 4, 32)
    out.copy_(q).view(-1, 8, 32).mul_(step).sub_(offset)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | e f16 | 12 B: as in Q4_K | 32 B: fifth bits | 4 x 32 B: nibbles |
    value = d * s * q - e * t"""
    step, offset = _steps_and_offsets(blocks)
    q = _unpack(blocks[:, 48:], 4, 32).add_(_unpack(blocks[:, 16:48], 1, 32), alpha=16)
    out.copy_(q).view(-1, 8, 32).mul_(step).sub_(offset)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """| 2 x 64 B: nibbles | 2 x 32 B: high 2 bits | 16 x int8: s of 16 values | d f16 |
    value = d * s * (q - 32)"""
    step = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    q = _unpack(blocks[:, :128], 4, 64).add_(_unpack(blocks[:, 128:192], 2, 32), alpha=16)
    out.copy_(q.sub_(32).view(torch.int8)).view(-1, 16, 16).mul_(step.unsqueeze(-1))


def _q8_k(blocks: Tensor, out: Tensor) -> None:
    """| d f32 | 256 x int8 | 16 x int16: sums of 16 values, not needed here |
    value = d * q"""
    out.copy_(blocks[:, 4:260].view(torch.int8)).mul_(blocks[:, :4].view(torch.float32))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@lru_cache(maxsize=16)
def _iq4_table(device: torch.device) -> Tensor:
    """Both values of every byte: [256 (byte), 2 (low nibble, high nibble)] int8, as int16 [256]."""
    pairs = [[IQ4_VALUES[byte & 15], IQ4_VALUES[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.int8, device=device).view(torch.int16).view(-1)


def _iq4_values(packed: Tensor) -> Tensor:
    """Look up nibbles, 16 bytes a group as in Q4_0: int8 [n, bytes / 16, 2, 16]."""
    pairs = _iq4_table(packed.device).index_select(0, packed.int().view(-1)).view(torch.int8)
    return pairs.view(packed.shape[0], -1, 16, 2).transpose(2, 3)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | 16 B: nibbles as in Q4_0, indices into a fixed table |
    value = d * table[q]"""
    out.view(-1, 1, 2, 16).copy_(_iq4_values(blocks[:, 2:]))
    out.mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """| d f16 | 2 B: high 2 bits of 8 s | 4 B: low nibbles of s | 8 x 16 B: nibbles as in IQ4_NL |
    value = d * (s - 32) * table[q]"""
    scale = _unpack(blocks[:, 4:8], 4, 1).add_(_unpack(blocks[:, 2:4], 2, 1), alpha=16)
    step = scale.sub_(32).view(torch.int8).float().mul_(_half(blocks, 0))
    out.view(-1, 8, 2, 16).copy_(_iq4_values(blocks[:, 8:]))
    out.view(-1, 8, 32).mul_(step.unsqueeze(-1))


FLOAT_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}

DEQUANTIZERS: dict[GGMLType, Callable[[Tensor, Tensor], None]] = {
    GGMLType.F32: _float32,
    GGMLType.F16: _float16,
    GGMLType.BF16: _bfloat16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.Q8_K: _q8_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
}
"""For each type: a function that fills float32 [n, values] from n blocks, uint8 [n, bytes]."""
