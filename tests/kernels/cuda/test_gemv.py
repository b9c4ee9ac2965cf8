"""Products of one row against those in double precision, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from device_weights import KINDS, device_weight, random
from triton_tools import launches

from octavo.kernels import reference
from octavo.kernels.cuda.gemv import multiply_row, multiply_row_by_nibbles, nibbles_tiling
from octavo.kernels.cuda.products import ACTIVATIONS, GemmFusion
from octavo.kernels.cuda.splits import Workspace
from octavo.kernels.cuda.weights import W4Weight
from octavo.kernels.op_arguments import RowNorm

ROWS = ["float", "int8 by rows", "FP8 by rows"]
NIBBLES = [kind for kind in KINDS if kind.startswith("nibbles")]
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]


def run(x, weight, out=None, fusion=GemmFusion(), processors=8):  # noqa: B008
    gated = fusion.activation is not None
    if out is None:
        width = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.full((1, width), torch.nan, dtype=x.dtype, device=x.device)
    if isinstance(weight, W4Weight):
        tiling = nibbles_tiling(weight, processors, gated=gated)
        workspace = Workspace.for_all([tiling], x.device)
        workspace.parts.fill_(torch.nan)
        multiply_row_by_nibbles(x, weight, out, tiling, workspace, fusion)
        assert not workspace.counters.any()  # ready for the next product
    else:
        multiply_row(x, weight, out, fusion)
    return out


def assert_near(got, expected, tolerance):
    error = (got.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max()  # and no NaN


@pytest.mark.parametrize("kind", [*ROWS, *NIBBLES])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_products(device, kind, dtype, tolerance):
    n, k = 133, 1280
    weight = device_weight(kind, n, k, dtype, device)
    x = random(1, 3 + k, dtype=dtype, device=device)[:, 3:]
    bias = random(n, device=device, seed=2)
    expected = x.double() @ weight.dense(torch.float64).T + bias
    assert_near(run(x, weight, fusion=GemmFusion(bias=bias)), expected, tolerance)


@pytest.mark.parametrize("kind", [*ROWS, "nibbles in 32, mins"])
def test_inputs_need_not_fill_the_last_step(device, kind):
    k = 1080 if kind in ROWS else 1056
    weight, x = device_weight(kind, 20, k, device=device), random(1, k, device=device)
    assert_near(run(x, weight), x.double() @ weight.dense(torch.float64).T, 1e-5)


@pytest.mark.parametrize("kind", [*ROWS, "nibbles in 128"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norms_before_and_activations_behind(device, kind, activation):
    x = random(1, 1280, device=device) * 100
    weight = device_weight(kind, 66, 1280, device=device)
    size = weight.dense(torch.float32).norm(dim=1).mean()
    norm = RowNorm(random(1280, device=device, seed=2) / size, 1e-5)
    normed = reference.rmsnorm(x, *norm)
    if kind not in ROWS:
        x, norm = normed, None
    bias = random(66, device=device, seed=3)
    got = run(x, weight, fusion=GemmFusion(norm, bias, activation))
    expected = normed.double() @ weight.dense(torch.float64).T + bias
    assert_near(got, ACTIVATIONS[activation](*expected.chunk(2, dim=1)), 1e-5)


@pytest.mark.parametrize("kind", [*ROWS, "nibbles in 128"])
def test_added_to_the_residual_stream(device, kind):
    x, weight = random(1, 1024, device=device), device_weight(kind, 40, 1024, device=device)
    stream = random(1, 50, device=device, seed=2)
    before = stream.double()
    run(x, weight, out=stream[:, 5:45], fusion=GemmFusion(accumulate=True))
    product = x.double() @ weight.dense(torch.float64).T
    assert_near(stream[:, 5:45], before[:, 5:45] + product, 1e-6)
    assert torch.equal(stream[:, :5], before[:, :5].float())
    assert torch.equal(stream[:, 45:], before[:, 45:].float())


@pytest.mark.parametrize("kind", ["float", "FP8 by rows", "nibbles in 128"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled(kind, arch):
    gated = GemmFusion(activation="silu")
    weight, x = device_weight(kind, 256, 1024, torch.bfloat16), torch.empty(1, 1024).bfloat16()
    (launch,) = launches(lambda: run(x, weight, fusion=gated))
    made = launch.compiled(arch)
    assert made.spills == 0 and made.registers <= 128
    assert "ld.global.v" in made.ptx or "cp.async" in made.ptx  # 16 bytes at a time
