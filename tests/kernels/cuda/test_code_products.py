"""What is around products in 8 bits, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from device_weights import random
from triton_tools import launches

from octavo.kernels.cuda.code_products import row_codes, scale_products

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("width", [40, 5000])
def test_codes_of_rows(device, dtype, width):
    x = random(4, width + 8, device=device)[:, 8:] * 5
    x[2] = 0
    codes = torch.zeros(4, width, dtype=dtype, device=device)
    scales = torch.full((4,), torch.nan, device=device)
    row_codes(x, codes, scales)
    # Divided by a tensor: PyTorch on a GPU multiplies by the reciprocal of a number.
    assert torch.equal(scales, x.abs().amax(1) / torch.full_like(scales, LARGEST[dtype]))
    units = x / scales.clamp(min=1e-30)[:, None]
    expected = units.round().to(torch.int8) if dtype == torch.int8 else units.to(dtype)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("accumulate", [False, True])
def test_integers_become_numbers(device, accumulate):
    integers = (random(3, 1100, device=device) * 1e5).int()
    row_scales, scales = random(3, device=device, seed=1), random(1100, device=device, seed=2)
    bias, out = random(1100, device=device, seed=3), random(3, 1200, device=device, seed=4)
    before = out.double()
    into = out[:, 50:1150]
    scale_products(integers, row_scales, scales, into, bias=bias, accumulate=accumulate)
    expected = integers.double() * row_scales[:, None] * scales + bias
    if accumulate:
        expected += before[:, 50:1150]
    assert torch.allclose(into.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(out[:, :50].double(), before[:, :50])


def test_compiled():
    x, codes = torch.empty(40, 4096).bfloat16(), torch.empty(40, 4096, dtype=torch.int8)
    integers, scales = codes.int(), torch.empty(4096)
    (first,) = launches(lambda: row_codes(x, codes, scales))
    (second,) = launches(lambda: scale_products(integers, scales, scales, x, accumulate=True))
    for launch, arch in ((first, 80), (first, 100), (second, 90)):
        made = launch.compiled(arch)
        assert made.spills == 0 and made.registers <= 64
        assert "ld.global.v" in made.ptx and "st.global.v" in made.ptx


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # codes of what is no number
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_damage_does_not_become_a_number(device, damage):
    x = torch.ones(2, 600, device=device)
    x[1, 300] = damage
    codes, scales = (
        torch.zeros(2, 600, dtype=torch.int8, device=device),
        torch.zeros(2, device=device),
    )
    row_codes(x, codes, scales)
    assert scales[0].isfinite() and not scales[1].isfinite()
