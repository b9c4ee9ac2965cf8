"""Products of few rows against those in double precision, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from triton_tools import ARCHS, launches

from octavo.kernels import reference
from octavo.kernels.cuda.gemv import MAX_ROWS, gemv, gemv_tiling
from octavo.kernels.cuda.products import Norm
from octavo.kernels.cuda.splits import Workspace

# Relative errors.
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
SPLITS = [False, True]
ACTIVATIONS = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_mul}


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype)


def run(x, weight, split, out=None, **settings):
    gated = settings.get("activation") is not None
    tiling = gemv_tiling(*weight.shape, 8, gated=gated)
    assert tiling.splits > 1
    if not split:
        tiling = replace(tiling, splits=1, split_k=tiling.splits * tiling.split_k)
    workspace = Workspace.for_all([tiling], x.device)
    workspace.parts.fill_(torch.nan)
    if out is None:
        width = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.full((len(x), width), torch.nan, dtype=x.dtype, device=x.device)
    gemv(x, weight, out, tiling, workspace, **settings)
    assert not workspace.counters.any()  # ready for the next product
    return out


def assert_near(got, expected, tolerance):
    error = (got.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max()  # and no NaN


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 33, 1153), (3, 64, 1024), (16, 20, 2000)])
def test_products(device, dtype, tolerance, split, rows, n, k):
    x, weight = random(rows, k, dtype=dtype, device=device), random(n, k, dtype=dtype, seed=1)
    weight, bias = weight.to(device), random(n, device=device, seed=2)
    expected = x.double() @ weight.double().T + bias
    assert_near(run(x, weight, split, bias=bias), expected, tolerance)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_norms_before_and_activations_behind(device, split, dtype, activation):
    tolerance = dict(DTYPES)[dtype]
    x = random(4, 1100, dtype=dtype, device=device) * 100
    weight = (random(66, 1100, seed=1) / 30).to(device, dtype)
    norm = Norm(random(1100, device=device, seed=2), 1e-5)
    bias = random(66, device=device, seed=3)
    got = run(x, weight, split, norm=norm, activation=activation, bias=bias)
    expected = reference.rmsnorm(x.double().float(), *norm).double() @ weight.double().T + bias
    if activation is not None:
        expected = ACTIVATIONS[activation](*expected.chunk(2, dim=1))
    assert_near(got, expected, tolerance)


@pytest.mark.parametrize("split", SPLITS)
def test_added_to_the_residual_stream(device, split):
    x, weight = random(3, 1024, device=device), random(40, 1024, device=device, seed=1)
    stream = random(3, 50, device=device, seed=2)
    before = stream.double()
    run(x, weight, split, out=stream[:, 5:45], accumulate=True)
    assert_near(stream[:, 5:45], before[:, 5:45] + x.double() @ weight.double().T, 1e-6)
    assert torch.equal(stream[:, :5], before[:, :5].float())
    assert torch.equal(stream[:, 45:], before[:, 45:].float())


def test_a_row_has_the_same_bits_in_any_company(device):
    x, weight = random(MAX_ROWS, 1200, device=device), random(48, 1200, device=device, seed=1)
    together = run(x, weight, True)
    for row in (0, 7, 15):
        assert torch.equal(run(x[row : row + 1], weight, True)[0], together[row])
    assert torch.equal(run(x[5:9], weight, True), together[5:9])


def test_products_of_one_stream_share_their_memory(device):
    x, wide, tall = (random(*s, device=device) for s in [(2, 1024), (96, 1024), (32, 1024)])
    tilings = [gemv_tiling(*weight.shape, 8) for weight in (wide, tall)]
    workspace = Workspace.for_all(tilings, device)
    for weight, tiling in [(wide, tilings[0]), (tall, tilings[1])] * 2:
        out = torch.empty(2, len(weight), device=device)
        gemv(x, weight, out, tiling, workspace)
        assert_near(out, x.double() @ weight.double().T, 1e-6)


@pytest.mark.parametrize("processors", [1, 30, 80, 132, 148])
@pytest.mark.parametrize("shape", [(1, 1), (576, 576), (4096, 14336), (128256, 2048), (17, 129)])
def test_splits_are_all_of_the_inputs(processors, shape):
    n, k = shape
    tiling = gemv_tiling(n, k, processors)
    assert (tiling.splits - 1) * tiling.split_k < k <= tiling.splits * tiling.split_k
    assert tiling.num_tiles * tiling.block_n >= n
    assert tiling.splits == 1 or tiling.split_k >= 512


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "k", "activation"), [(1024, 1024, None), (32768, 2048, "silu")])
def test_compiled(arch, n, k, activation):
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16) for rows in (3, n))
    tiling = gemv_tiling(n, k, 132, gated=activation is not None)
    assert (tiling.splits > 1) == (n == 1024)
    workspace = Workspace.for_all([tiling], "cpu")
    out = torch.empty(3, n // 2 if activation else n, dtype=torch.bfloat16)

    def launch():
        norm = Norm(x[0], 1e-5)
        gemv(x, weight, out, tiling, workspace, norm=norm, activation=activation)

    made = launches(launch)[0].compiled(arch)
    assert made.spills == 0 and made.registers <= 128
    assert made.shared <= 64 << 10  # so that a large GPU has three programs a multiprocessor
    assert "mma.sync" in made.ptx and "cp.async" in made.ptx
