"""Damage and caps of rows, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch
from triton_tools import EACH_ARCH, launches

from octavo.kernels import reference
from octavo.kernels.cuda.rows import find_damage, softcap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_damage_is_found_wherever_it_is(device, dtype):
    wide = torch.zeros(6, 4000, dtype=dtype, device=device)
    wide[:, 3000:] = math.nan  # of nobody
    x = wide[:, 500:3000]
    x[1, 0], x[2, 2499], x[3, 1234], x[4, 7] = math.inf, -math.inf, math.nan, 6e4
    damaged = torch.full((6,), 7, dtype=torch.int32, device=device)
    find_damage(x, damaged)
    assert damaged.tolist() == [0, 1, 1, 1, 0, 0]


def test_sums_of_both_signs_hide_nothing(device):
    x = torch.tensor([[math.inf, -math.inf], [1e30, -1e30]], device=device)
    damaged = torch.zeros(2, dtype=torch.int32, device=device)
    find_damage(x, damaged)
    assert damaged.tolist() == [1, 0]


def test_softcap(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2100, generator=generator) * 40
    logits[0, :4] = torch.tensor([1e4, -1e4, 0.0, 1e-3])
    capped = logits.clone().to(device)
    softcap(capped, 30.0)
    assert torch.allclose(capped.cpu(), reference.softcap(logits, 30.0), atol=1e-5)
    capped[1, 5] = math.nan
    softcap(capped, 30.0)
    assert capped.isnan().nonzero().tolist() == [[1, 5]]


def test_nothing_is_launched_for_no_rows():
    nothing = torch.zeros(0, 8)
    made = launches(lambda: (softcap(nothing, 1.0), find_damage(nothing, nothing[:, 0].int())))
    assert not made


@pytest.mark.parametrize("arch", EACH_ARCH)
def test_compiled(arch):
    x, logits = torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(2, 1 << 17)
    damaged = torch.zeros(2, dtype=torch.int32)
    for launch in launches(lambda: (find_damage(x, damaged), softcap(logits, 30.0))):
        made = launch.compiled(arch)
        assert made.spills == 0 and made.registers <= 64
        assert "ld.global.v" in made.ptx
