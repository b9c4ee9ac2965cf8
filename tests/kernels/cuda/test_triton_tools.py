"""The tools that the tests of Triton kernels stand on, with a kernel of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton_tools import EACH_ARCH, SHARED_LIMIT, interpreting, launches


@triton.jit
def _row_sum(x, width, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x + tl.program_id(0) * width + place, mask=place < width, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _count_and_sum(x, out, count, width, factor, BLOCK: tl.constexpr):
    """Sums of rows, times a factor and the number of programs that came before."""
    before = tl.atomic_add(count, 1)
    tl.store(out + tl.program_id(0), _row_sum(x, width, BLOCK) * factor * before)


@triton.jit
def _product(x, y, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + place)
    tl.store(y + place, tl.dot(tile, tile))


@triton.jit
def _copy(x, y, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place).to(y.dtype.element_ty))


def sums():
    x = torch.arange(60.0).view(3, 20)
    out, count = torch.zeros(3), torch.zeros(1, dtype=torch.int32)
    _count_and_sum[(3,)](x, out, count, 20, 2.0, BLOCK=16, num_warps=1)
    return out, x.sum(dim=1) * 2 * torch.arange(3)


@pytest.mark.parametrize("turn", range(2))
def test_kernels_are_interpreted_and_then_compiled_in_one_process(turn):
    with interpreting():
        out, expected = sums()
    assert torch.equal(out, expected)
    (launch,) = launches(sums)
    assert launch.grid == (3,) and launch.options == {"num_warps": 1}
    made = launch.compiled(80)
    assert made.spills == 0 and 0 < made.registers <= 255 and "_count_and_sum" in made.ptx


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_floats_are_interpreted_with_the_rounding_of_a_gpu(dtype):
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 4
    y = torch.empty(1024, dtype=dtype)
    with interpreting():
        _copy[(1,)](x, y, BLOCK=1024)
    assert torch.equal(y.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_are_interpreted_as_they_are_on_a_gpu(dtype):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[15] = x[0]
    y = torch.empty(16, 16)
    with interpreting():
        _product[(1,)](x, y, BLOCK=16)
    assert torch.allclose(y, x.float() @ x.float(), atol=1e-5)
    assert torch.equal(y[15], y[0])


@pytest.mark.parametrize("arch", EACH_ARCH)
def test_large_products_use_what_an_architecture_has(arch):
    def launch():
        _product[(1,)](*torch.zeros(2, 64, 64, dtype=torch.bfloat16), BLOCK=64)

    made = launches(launch)[0].compiled(arch)
    assert 0 < made.shared <= SHARED_LIMIT[arch]
    words = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
    assert words[arch] in made.ptx


def test_spills_are_seen():
    def launch():
        _product[(1,)](*torch.zeros(2, 64, 64), BLOCK=64, num_warps=4, maxnreg=32)

    assert launches(launch)[0].compiled(80).spills > 0
