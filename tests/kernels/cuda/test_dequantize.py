"""Numbers of codes, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from device_weights import KINDS, device_weight
from triton_tools import EACH_ARCH, launches

from octavo.kernels.cuda.dequantize import dequantize, room_for

CODES = [kind for kind, make in KINDS.items() if make is not None]


def assert_same(got, expected):
    if got.dtype == torch.float32:
        assert torch.equal(got.cpu(), expected.cpu())
    else:  # rounded from float32 either way, but a product and a sum may be one or two roundings
        assert torch.allclose(got.cpu().float(), expected.cpu(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_whole_matrix(device, kind, dtype):
    weight = device_weight(kind, 70, 512, device=device)
    room = room_for(weight, torch.full((70 * 512 + 3,), torch.nan, dtype=dtype, device=device))
    assert room.shape == (70, 512)
    dequantize(weight, room)
    assert_same(room, weight.dense(torch.float32))


@pytest.mark.parametrize("kind", CODES)
def test_of_some_outputs_of_it(device, kind):
    weight = device_weight(kind, 70, 512, device=device).narrow(16, 48)
    room = room_for(weight, torch.full((32 * 512,), torch.nan, device=device))
    dequantize(weight, room)
    assert_same(room, weight.dense(torch.float32))


@pytest.mark.parametrize("kind", CODES)
def test_of_rows(device, kind):
    weight = device_weight(kind, 70, 768, device=device)
    ids = torch.tensor([3, 69, 0, 3, 17], dtype=torch.int32, device=device)
    wide = torch.full((5, 800), torch.nan, device=device)
    dequantize(weight, wide[:, 16:784], ids)
    assert_same(wide[:, 16:784], weight.dense(torch.float32)[ids.long()])
    assert wide[:, :16].isnan().all() and wide[:, 784:].isnan().all()


@pytest.mark.parametrize("arch", EACH_ARCH)
@pytest.mark.parametrize("kind", ["nibbles in 32, mins", "int8 in 16", "FP8 by rows"])
def test_compiled(kind, arch):
    weight = device_weight(kind, 64, 1024)
    room = room_for(weight, torch.empty(64 * 1024, dtype=torch.bfloat16))
    (launch,) = launches(lambda: dequantize(weight, room))
    made = launch.compiled(arch)
    assert made.spills == 0 and made.registers <= 64
    assert "st.global.v4" in made.ptx  # 16 bytes at a time
