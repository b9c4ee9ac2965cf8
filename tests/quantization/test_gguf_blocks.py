"""What is packed is what dequantization reads: each value is the formula of its type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.quantization import gguf_blocks as pack
from octavo.quantization.ggml_types import GGMLType, block_shape
from octavo.quantization.gguf_formats import IQ4_VALUES, dequantize

N = 37  # blocks


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def halves(random: torch.Generator) -> Tensor:
    return torch.randn(N, generator=random).half().float()


def integers(random: torch.Generator, low: int, high: int, count: int) -> Tensor:
    """All from ``low`` to ``high`` occur: float32 [N, count]"""
    values = torch.randint(low, high + 1, (N, count), generator=random).float()
    values[0, 0], values[0, 1], values[-1, -2], values[-1, -1] = low, high, low, high
    return values


def check(type: GGMLType, data: Tensor, expected: Tensor) -> None:
    assert data.dtype == torch.uint8 and data.shape == (N, block_shape(type)[1])
    assert torch.equal(dequantize(type, data), expected)


def spread(scales: Tensor, values: int) -> Tensor:
    """Scales of sub-blocks, for each of the values of a super-block."""
    return scales.repeat_interleave(values // scales.shape[1], dim=1)


@pytest.mark.parametrize(
    ("type", "packed", "low", "high"),
    [
        (GGMLType.Q4_0, pack.pack_q4_0, -8, 7),
        (GGMLType.Q5_0, pack.pack_q5_0, -16, 15),
        (GGMLType.Q8_0, pack.pack_q8_0, -128, 127),
    ],
)
def test_scale(type: GGMLType, packed: Callable[..., Tensor], low: int, high: int) -> None:
    random = generator()
    d, q = halves(random), integers(random, low, high, 32)
    check(type, packed(d, q), d[:, None] * q)


@pytest.mark.parametrize(
    ("type", "packed", "high"),
    [(GGMLType.Q4_1, pack.pack_q4_1, 15), (GGMLType.Q5_1, pack.pack_q5_1, 31)],
)
def test_scale_and_offset(type: GGMLType, packed: Callable[..., Tensor], high: int) -> None:
    random = generator()
    d, m, q = halves(random), halves(random), integers(random, 0, high, 32)
    check(type, packed(d, m, q), d[:, None] * q + m[:, None])


@pytest.mark.parametrize(
    ("type", "packed", "level", "scale"),
    [
        (GGMLType.Q3_K, pack.pack_q3_k, (-4, 3), (-32, 31)),
        (GGMLType.Q6_K, pack.pack_q6_k, (-32, 31), (-128, 127)),
    ],
)
def test_scales_of_sub_blocks(
    type: GGMLType,
    packed: Callable[..., Tensor],
    level: tuple[int, int],
    scale: tuple[int, int],
) -> None:
    random = generator()
    d, s, q = halves(random), integers(random, *scale, 16), integers(random, *level, 256)
    check(type, packed(d, s, q), d[:, None] * spread(s, 256) * q)


@pytest.mark.parametrize(
    ("type", "packed", "sub_blocks", "level", "scale"),
    [
        (GGMLType.Q2_K, pack.pack_q2_k, 16, 3, 15),
        (GGMLType.Q4_K, pack.pack_q4_k, 8, 15, 63),
        (GGMLType.Q5_K, pack.pack_q5_k, 8, 31, 63),
    ],
)
def test_scales_and_offsets_of_sub_blocks(
    type: GGMLType, packed: Callable[..., Tensor], sub_blocks: int, level: int, scale: int
) -> None:
    random = generator()
    d, e, q = halves(random), halves(random), integers(random, 0, level, 256)
    s, t = (integers(random, 0, scale, sub_blocks) for _ in range(2))
    expected = d[:, None] * spread(s, 256) * q - e[:, None] * spread(t, 256)
    check(type, packed(d, e, s, t, q), expected)


def test_iq4_nl() -> None:
    random = generator()
    d, q = halves(random), torch.tensor(IQ4_VALUES)[integers(random, 0, 15, 32).long()].float()
    check(GGMLType.IQ4_NL, pack.pack_iq4_nl(d, q), d[:, None] * q)


def test_iq4_xs() -> None:
    random = generator()
    d, s = halves(random), integers(random, -32, 31, 8)
    q = torch.tensor(IQ4_VALUES)[integers(random, 0, 15, 256).long()].float()
    check(GGMLType.IQ4_XS, pack.pack_iq4_xs(d, s, q), d[:, None] * spread(s, 256) * q)
