"""Packs scales and levels into the bytes of quantized GGUF blocks: the inverse of gguf_formats.py.

Layouts are in the docstrings of that file. The functions here take float32 tensors, of float16
values or of integers, and return uint8 [n, bytes of a block] for n blocks:

    d, e, m    [n]              float16 scales and offsets
    s, t       [n, sub-blocks]  integer scales and offsets
    q          [n, values]      levels, as the value is computed with them: signed in some types
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quantization.gguf_formats import IQ4_VALUES


def _half(scale: Tensor) -> Tensor:
    """Bytes of one float16 for each block."""
    return scale.half().unsqueeze(1).view(torch.uint8)


def _signed(integers: Tensor) -> Tensor:
    """Bytes of signed integers."""
    return integers.to(torch.int8).view(torch.uint8)


def _pack(fields: Tensor, bits: int, group: int) -> Tensor:
    """Pack fields of ``bits`` bits into bytes: uint8 [n, fields] -> uint8 [n, fields * bits / 8].

    Byte ``i`` of each ``group`` bytes gets field ``i`` as its lowest bits, field ``group + i`` as
    the next ones, and so on.
    """
    fields = fields.reshape(fields.shape[0], -1, 8 // bits, group)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device).view(-1, 1)
    return (fields << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _nibbles(q: Tensor, group: int) -> Tensor:
    """Pack the lowest four bits of each level."""
    return _pack(q & 15, 4, group)


def pack_q4_0(d: Tensor, q: Tensor) -> Tensor:
    return torch.cat([_half(d), _nibbles((q + 8).byte(), 16)], dim=1)


def pack_q4_1(d: Tensor, m: Tensor, q: Tensor) -> Tensor:
    return torch.cat([_half(d), _half(m), _nibbles(q.byte(), 16)], dim=1)


def pack_q5_0(d: Tensor, q: Tensor) -> Tensor:
    q = (q + 16).byte()
    return torch.cat([_half(d), _pack(q >> 4, 1, 1), _nibbles(q, 16)], dim=1)


def pack_q5_1(d: Tensor, m: Tensor, q: Tensor) -> Tensor:
    q = q.byte()
    return torch.cat([_half(d), _half(m), _pack(q >> 4, 1, 1), _nibbles(q, 16)], dim=1)


def pack_q8_0(d: Tensor, q: Tensor) -> Tensor:
    return torch.cat([_half(d), _signed(q)], dim=1)


def pack_q2_k(d: Tensor, e: Tensor, s: Tensor, t: Tensor, q: Tensor) -> Tensor:
    return torch.cat([(s + 16 * t).byte(), _pack(q.byte(), 2, 32), _half(d), _half(e)], dim=1)


def pack_q3_k(d: Tensor, s: Tensor, q: Tensor) -> Tensor:
    q, s = (q + 4).byte(), (s + 32).byte()
    levels = [_pack(q >> 2, 1, 32), _pack(q & 3, 2, 32)]
    return torch.cat([*levels, _nibbles(s, 8), _pack(s >> 4, 2, 4), _half(d)], dim=1)


def _steps_and_offsets(d: Tensor, e: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """The first 16 bytes of Q4_K and Q5_K blocks."""
    numbers = torch.stack([s, t], dim=1).byte()  # [n, 2, 8]
    first, last = numbers[:, :, :4], numbers[:, :, 4:]
    packed = [(first | (last >> 4 << 6)).flatten(1), _nibbles(last.flatten(1), 4)]
    return torch.cat([_half(d), _half(e), *packed], dim=1)


def pack_q4_k(d: Tensor, e: Tensor, s: Tensor, t: Tensor, q: Tensor) -> Tensor:
    return torch.cat([_steps_and_offsets(d, e, s, t), _nibbles(q.byte(), 32)], dim=1)


def pack_q5_k(d: Tensor, e: Tensor, s: Tensor, t: Tensor, q: Tensor) -> Tensor:
    q = q.byte()
    scales = _steps_and_offsets(d, e, s, t)
    return torch.cat([scales, _pack(q >> 4, 1, 32), _nibbles(q, 32)], dim=1)


def pack_q6_k(d: Tensor, s: Tensor, q: Tensor) -> Tensor:
    q = (q + 32).byte()
    return torch.cat([_nibbles(q, 64), _pack(q >> 4, 2, 32), _signed(s), _half(d)], dim=1)


def _iq4_indices(q: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=q.dtype, device=q.device)
    return torch.bucketize(q.contiguous(), values, out_int32=True).byte()


def pack_iq4_nl(d: Tensor, q: Tensor) -> Tensor:
    return torch.cat([_half(d), _nibbles(_iq4_indices(q), 16)], dim=1)


def pack_iq4_xs(d: Tensor, s: Tensor, q: Tensor) -> Tensor:
    s = (s + 32).byte()
    return torch.cat(
        [_half(d), _pack(s >> 4, 2, 1), _nibbles(s, 1), _nibbles(_iq4_indices(q), 16)], dim=1
    )
