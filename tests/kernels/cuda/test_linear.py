"""Products of few rows against those in double precision, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from device_weights import KINDS, device_weight, random
from triton_tools import ARCHS, SHARED_LIMIT, launches

from octavo.kernels.cuda.linear import linear, tiling_of
from octavo.kernels.cuda.products import ACTIVATIONS, GemmFusion
from octavo.kernels.cuda.splits import Workspace
from octavo.kernels.cuda.weights import DenseWeight, W4Weight, W8Weight

# Relative errors.
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
SPLITS = [False, True]
FEW_BYTES = 16  # that are put aside once, as products in the memory of tensor cores have it


def run(x, weight, split, out=None, rows=16, row_tiles=1, fusion=GemmFusion()):  # noqa: B008
    gated = fusion.activation is not None
    tiling = tiling_of(weight, rows, 8, gated=gated, row_tiles=row_tiles)
    assert tiling.splits > 1
    if not split:
        tiling = replace(tiling, splits=1, split_k=tiling.splits * tiling.split_k)
    workspace = Workspace.for_all([tiling], x.device)
    workspace.parts.fill_(torch.nan)
    if out is None:
        width = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.full((len(x), width), torch.nan, dtype=x.dtype, device=x.device)
    linear(x, weight, out, tiling, workspace, fusion)
    assert not workspace.counters.any()  # ready for the next product
    return out


def assert_near(got, expected, tolerance):
    error = (got.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max()  # and no NaN


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_products(device, kind, dtype, tolerance):
    for split, rows, n, k in [(True, 1, 33, 1280), (False, 19, 66, 1024)]:
        weight = device_weight(kind, n, k, dtype, device)
        x = random(rows, 3 + k, dtype=dtype, device=device)[:, 3:]
        bias = random(n, device=device, seed=2)
        expected = x.double() @ weight.dense(torch.float64).T + bias
        got = run(x, weight, split, rows=16 if rows == 1 else 32, fusion=GemmFusion(bias=bias))
        assert_near(got, expected, tolerance)


@pytest.mark.parametrize("kind", ["float", "nibbles in 32, mins", "int8 by rows", "FP8 in 128"])
def test_inputs_need_not_fill_the_last_step(device, kind):
    k = 1080 if kind != "nibbles in 32, mins" else 1056
    weight, x = device_weight(kind, 20, k, device=device), random(3, k, device=device)
    assert_near(run(x, weight, True), x.double() @ weight.dense(torch.float64).T, 1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["float", "nibbles in 128", "int8 in 16", "FP8 by rows"])
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.float32, None), (torch.bfloat16, "silu"), *((torch.float32, a) for a in ACTIVATIONS)],
)
def test_activations_behind(device, split, dtype, kind, activation):
    tolerance = dict(DTYPES)[dtype]
    weight = device_weight(kind, 66, 1280, dtype, device)
    size = weight.dense(torch.float32).norm(dim=1).mean()
    x = (random(4, 1280, device=device) / size).to(dtype)
    bias = random(66, device=device, seed=3)
    got = run(x, weight, split, fusion=GemmFusion(bias=bias, activation=activation))
    expected = x.double() @ weight.dense(torch.float64).T + bias
    if activation is not None:
        expected = ACTIVATIONS[activation](*expected.chunk(2, dim=1))
    assert_near(got, expected, tolerance)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["float", "nibbles in 128"])
def test_added_to_the_residual_stream(device, split, kind):
    x, weight = random(3, 1024, device=device), device_weight(kind, 40, 1024, device=device)
    stream = random(3, 50, device=device, seed=2)
    before = stream.double()
    run(x, weight, split, out=stream[:, 5:45], fusion=GemmFusion(accumulate=True))
    product = x.double() @ weight.dense(torch.float64).T
    assert_near(stream[:, 5:45], before[:, 5:45] + product, 1e-6)
    assert torch.equal(stream[:, :5], before[:, :5].float())
    assert torch.equal(stream[:, 45:], before[:, 45:].float())


@pytest.mark.parametrize("kind", ["float", "nibbles in 32, mins", "int8 in 32, mins"])
def test_a_row_has_the_same_bits_in_any_company(device, kind):
    x, weight = random(70, 1280, device=device), device_weight(kind, 48, 1280, device=device)
    together = run(x, weight, True, rows=16, row_tiles=5)
    for row in (0, 7, 15, 16, 69):
        alone = run(x[row : row + 1], weight, True, rows=16, row_tiles=5)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(run(x[5:40], weight, True, rows=16, row_tiles=3), together[5:40])


def test_products_of_one_stream_share_their_memory(device):
    x = random(2, 1024, device=device)
    weights = [device_weight("float", 96, 1024), device_weight("nibbles in 128", 32, 1024)]
    tilings = [tiling_of(weight, 16, 8) for weight in weights]
    workspace = Workspace.for_all(tilings, device)
    for weight, tiling in list(zip(weights, tilings, strict=True)) * 2:
        out = torch.empty(2, weight.shape[0], device=device)
        linear(x, weight, out, tiling, workspace, GemmFusion())
        assert_near(out, x.double() @ weight.dense(torch.float64).T, 1e-6)


def nothing(*shape, dtype=torch.bfloat16):
    """A tensor of no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def of_kind(kind, n, k):
    """A weight of no memory."""
    half = torch.float16
    match kind.split():
        case ["float"]:
            return DenseWeight(nothing(n, k))
        case ["nibbles", group]:
            scales = nothing(-(-k // 128) * 128 // int(group), n, dtype=half)
            words = nothing(-(-k // 128) * 16, n, dtype=torch.int32)
            return W4Weight(words, scales, scales, int(group), (n, k))
        case ["int8", group]:
            scales = nothing(-(-k // int(group)), n, dtype=half)
            return W8Weight(nothing(n, k, dtype=torch.int8), scales, None, int(group))
        case _:
            codes = nothing(n, k, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn)
            return W8Weight(codes, nothing(1, n, dtype=torch.float32), None, None)


@pytest.mark.parametrize("processors", [1, 30, 80, 132, 148])
@pytest.mark.parametrize("shape", [(1, 1), (576, 576), (4096, 14336), (128256, 2048), (17, 129)])
@pytest.mark.parametrize("kind", ["float", "nibbles 32"])
def test_splits_are_all_of_the_inputs(processors, shape, kind):
    n, k = shape
    tiling = tiling_of(of_kind(kind, n, k), 16, processors)
    assert (tiling.splits - 1) * tiling.split_k < k <= tiling.splits * tiling.split_k
    assert tiling.num_tiles * tiling.block_n >= n
    assert tiling.splits == 1 or tiling.split_k >= 4 * tiling.block_k


WORDS = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # of tensor cores, in PTX
WIDE, GATED = (1024, 1024, None), (28672, 4096, "silu")


@pytest.mark.parametrize(
    ("kind", "arch", "of"),
    [
        *(("float", 90, of) for of in (WIDE, GATED)),
        *(
            pytest.param("float", arch, of, marks=pytest.mark.long)
            for arch in ARCHS
            for of in (WIDE, GATED)
            if arch != 90
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *[("nibbles 32", 80, WIDE), ("nibbles 128", 90, GATED), ("int8 16", 89, GATED)],
                *[("int8", 90, WIDE), ("fp8", 90, GATED), ("fp8", 100, WIDE)],
            )
        ),
    ],
)
def test_compiled(kind, arch, of):
    n, k, activation = of
    weight, x = of_kind(kind, n, k), nothing(3, k)
    tiling = tiling_of(weight, 16, 132, gated=activation is not None)
    assert (tiling.splits > 1) == (n == 1024)
    workspace = Workspace.for_all([tiling], "meta")
    out = nothing(3, n // 2 if activation else n)
    fusion = GemmFusion(activation=activation)
    (launch,) = launches(lambda: linear(x, weight, out, tiling, workspace, fusion))
    made = launch.compiled(arch)
    assert made.spills == 0 and made.registers <= 168
    assert made.shared <= 64 << 10  # so that a large GPU has three programs a multiprocessor
    assert WORDS.get(arch, "mma.sync") in made.ptx and "cp.async" in made.ptx


@pytest.mark.parametrize(
    ("kind", "rows", "arch"),
    [("nibbles 32", 64, 90), ("int8 32", 64, 89), ("fp8", 64, 100)],
)
@pytest.mark.long
def test_compiled_for_many_rows(kind, rows, arch):
    weight, x, out = of_kind(kind, 4096, 4096), nothing(rows, 4096), nothing(rows, 4096)
    tiling = tiling_of(weight, rows, 132)
    workspace = Workspace.for_all([tiling], "meta")
    (launch,) = launches(lambda: linear(x, weight, out, tiling, workspace, GemmFusion()))
    made = launch.compiled(arch)
    assert made.spills <= FEW_BYTES and made.shared <= SHARED_LIMIT[arch]
    assert WORDS.get(arch, "mma.sync") in made.ptx and "cp.async" in made.ptx
