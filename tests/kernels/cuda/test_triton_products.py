"""Products by Triton's kernels and torch's against plain ones, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from device_weights import KINDS, device_weight, random

from octavo.kernels.cuda import triton_products
from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.gemm_dispatch import GemmConditions, GemmKind, gemm_kind
from octavo.kernels.cuda.products import GemmFusion, PlainProducts
from octavo.kernels.cuda.triton_products import TritonProducts, WeightUse
from octavo.kernels.cuda.weights import DenseWeight
from octavo.kernels.op_arguments import RowNorm

HOPPER, AMPERE = Gpu(90, 8), Gpu(80, 8)
ALL = [*KINDS, "joined"]
N, K = 96, 512
# Relative errors; where activations are rounded too, of a row's largest.
FLOAT32, BFLOAT16, CODED = 1e-5, 2e-2, 4e-2


def products_of(weight, x, **settings):
    settings = {"gpu": HOPPER, "gated": False} | settings
    gpu, gated = settings.pop("gpu"), settings.pop("gated")
    conditions = GemmConditions(gpu, x.dtype, **settings)
    made = TritonProducts([WeightUse(weight, len(x), gated)], conditions, x.device)
    for memory in ("_normed", "_wide", "_scratch", "_scales"):
        getattr(made, memory).fill_(torch.nan)
    return made


def around_of(what, device):
    norm, bias = RowNorm(random(K, device=device, seed=5), 1e-5), random(N, device=device, seed=6)
    return {
        "nothing": GemmFusion(),
        "all before": GemmFusion(norm, bias, "gelu_tanh"),
        "a residual": GemmFusion(norm, bias, None, accumulate=True),
    }[what]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("what", ["nothing", "all before", "a residual"])
@pytest.mark.parametrize("rows", [2, pytest.param(70, marks=pytest.mark.long)])
def test_products(device, kind, what, rows):
    for dtype in (torch.float32, torch.bfloat16):
        weight, fusion = device_weight(kind, N, K, dtype, device), around_of(what, device)
        x = random(rows, K, dtype=dtype, device=device)
        gated = fusion.activation is not None
        out = random(rows, N // 2 if gated else N, dtype=dtype, device=device, seed=7)
        expected = out.float()
        PlainProducts().linear(x.float(), weight, expected, fusion)
        products_of(weight, x, gated=gated).linear(x, weight, out, fusion)
        gemm = gemm_kind(weight, rows, GemmConditions(HOPPER, dtype))
        tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
        if gemm in (GemmKind.FP8, GemmKind.INT8):
            tolerance = CODED
        assert (out.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", ["float", "nibbles in 128"])
@pytest.mark.parametrize("rows", [3, 70])
def test_norms_in_float16_go_first(device, kind, rows):
    """Whose range inputs of 300, times a norm's weight of 400, would leave."""
    weight = device_weight(kind, N, K, torch.float16, device)
    x = random(rows, K, dtype=torch.float16, device=device) * 100
    fusion = GemmFusion(RowNorm(torch.full((K,), 400.0, device=device), 1e-5))
    out = torch.zeros(rows, N, dtype=torch.float16, device=device)
    weight_scale = 1000 * weight.dense(torch.float32).abs().max()
    if kind == "float":
        weight.values.div_(weight_scale)
    expected = torch.zeros(rows, N, device=device)
    PlainProducts().linear(x.float(), weight, expected, fusion)
    products_of(weight, x).linear(x, weight, out, fusion)
    assert (out.float() - expected).abs().max() <= 1e-2 * expected.abs().max()


def scales_of(x, largest):
    """Scales [T, 1] of the codes of rows; divided by a tensor, since PyTorch on a GPU multiplies
    by the reciprocal of a number, and a code at the edge between two would be another one."""
    top = x.float().abs().amax(1, keepdim=True)
    return top / torch.full_like(top, largest)


@pytest.mark.parametrize("kind", ["int8 for int8", "FP8 for FP8"])
def test_products_in_8_bits_are_those_of_rounded_activations(device, kind):
    dtype = torch.bfloat16
    weight, x = device_weight(kind, N, K, dtype, device), random(40, K, dtype=dtype, device=device)
    largest, code = (448.0, weight.codes.dtype) if weight.is_fp8 else (127.0, torch.int8)
    scale = scales_of(x, largest)
    units = x.float() / scale
    rounded = (units.to(code).float() if weight.is_fp8 else units.round()) * scale
    expected = rounded.double() @ weight.dense(torch.float64).T
    out = torch.zeros(40, N, dtype=dtype, device=device)
    products_of(weight, x).linear(x, weight, out, GemmFusion())
    assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("FP8 for FP8", {"gpu": AMPERE}),
        ("FP8 for FP8", {"activations": "int16"}),
        ("int8 for int8", {"activations": "int16"}),
        ("FP8 by rows", {}),
        ("int8 by rows", {}),
    ],
)
def test_what_is_not_rounded_is_expanded(device, kind, settings):
    weight = device_weight(kind, N, K, torch.bfloat16, device)
    x = random(70, K, dtype=torch.bfloat16, device=device)
    out = torch.zeros(70, N, dtype=torch.bfloat16, device=device)
    products_of(weight, x, **settings).linear(x, weight, out, GemmFusion())
    expected = x.double() @ weight.dense(torch.bfloat16).double().T
    assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.parametrize("kind", ["float", "nibbles in 128", "int8 for int8", "joined"])
def test_pieces_of_rows_and_of_outputs_are_the_whole(device, kind, monkeypatch):
    n = 320
    weight, x = device_weight(kind, n, K, device=device), random(150, K, device=device)
    expected = torch.zeros(150, n, device=device)
    PlainProducts().linear(x, weight, expected, GemmFusion())
    monkeypatch.setattr(triton_products, "PIECE_ROWS", 100)
    monkeypatch.setattr(triton_products, "_INTEGER_ROWS", 40)
    monkeypatch.setattr(triton_products, "_EXPANDED_VALUES", 128 * K)
    out = torch.zeros(150, n, device=device)
    products_of(weight, x).linear(x, weight, out, GemmFusion())
    tolerance = CODED if kind == "int8 for int8" else FLOAT32
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["float", "nibbles in 32, mins", "int8 by rows", "joined"])
@pytest.mark.parametrize("gated", [False, True])
def test_invariant_rows_have_the_same_bits_in_any_company(device, kind, gated):
    weight, x = device_weight(kind, N, K, device=device), random(90, K, device=device)
    fusion = around_of("all before" if gated else "nothing", device)
    products = products_of(weight, x, gated=gated, invariant=True)

    def rows(start, stop):
        out = torch.full((stop - start, N // 2 if gated else N), torch.nan, device=device)
        products.linear(x[start:stop], weight, out, fusion)
        return out

    together = rows(0, 90)
    for start, stop in [(0, 1), (89, 90), (10, 30), (31, 80)]:
        assert torch.equal(rows(start, stop), together[start:stop])
    expected = torch.zeros_like(together)
    PlainProducts().linear(x, weight, expected, fusion)
    assert (together - expected).abs().max() <= FLOAT32 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight(device, kind):
    weight = device_weight(kind, 70, K, torch.bfloat16, device)
    ids = torch.tensor([5, 0, 69, 5], dtype=torch.int32, device=device)
    out = torch.zeros(4, K, dtype=torch.bfloat16, device=device)
    products_of(weight, out).rows(weight, ids, out)
    expected = weight.dense(torch.float32)[ids.long()]
    assert torch.allclose(out.float(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 40])
def test_logits_are_float32(device, rows):
    if device == "cpu" and rows > 16:
        pytest.skip("torch multiplies bfloat16 to float32 on GPUs alone")
    weight = device_weight("float", N, K, torch.bfloat16, device)
    x = random(rows, K, dtype=torch.bfloat16, device=device)
    out = torch.zeros(rows, N, device=device)
    products_of(weight, x).linear(x, weight, out, GemmFusion())
    expected = x.double() @ weight.dense(torch.float64).T
    assert (out.double() - expected).abs().max() <= FLOAT32 * expected.abs().max()


def test_logits_of_fp8_are_not_rounded_to_16_bits(device):
    """They are products of codes, which bfloat16 would move by up to 2^-9 of themselves. Tensor
    cores of a GPU sum 32 products of FP8 with 14 bits (3.3e-4 of the largest here, on an H200)."""
    weight = device_weight("FP8 for FP8", N, K, torch.bfloat16, device)
    x = random(40, K, dtype=torch.bfloat16, device=device)
    scale = scales_of(x, 448.0)
    rounded = (x.float() / scale).to(torch.float8_e4m3fn).double() * scale
    bias = random(N, device=device, seed=6)
    out = torch.zeros(40, N, device=device)
    products_of(weight, x).linear(x, weight, out, GemmFusion(bias=bias))
    expected = rounded @ weight.dense(torch.float64).T + bias
    tolerance = 1e-5 if device == "cpu" else 2**-11
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_memory_is_what_the_named_uses_need():
    x = torch.zeros(4096, K)
    dense = products_of(device_weight("float", N, K), x)
    assert dense.nbytes <= x.nbytes + (1 << 16)  # norms, and parts of splits
    few = products_of(device_weight("float", N, K), x[:16])
    assert few.nbytes <= 1 << 16
    gated = products_of(device_weight("float", N, K), x, gated=True)
    assert dense.nbytes + 4096 * N * 4 <= gated.nbytes + (1 << 16)


@pytest.mark.parametrize("kind", ["float", "nibbles in 128"])
def test_rows_of_a_matrix_have_the_bits_of_the_whole(device, kind):
    """Whatever other rows a rank has: inputs are split as for all of them together."""
    conditions = GemmConditions(HOPPER, torch.float32, invariant=True)
    n, k = 512, 2048
    whole = device_weight(kind, n, k, torch.float32, device)
    x, part = random(3, k, device=device), slice(128, 192)
    if isinstance(whole, DenseWeight):
        own = DenseWeight(whole.values[part].contiguous())
    else:
        own = whole.narrow(part.start, part.stop)
    found = {}
    for name, weight, of_outputs in (
        ("whole", whole, n),
        ("part", own, n),
        ("alone", own, None),
    ):
        made = TritonProducts([WeightUse(weight, 3, of_outputs=of_outputs)], conditions, device)
        found[name] = torch.empty(3, weight.shape[0], device=device)
        made.linear(x, weight, found[name], GemmFusion())
        found[name, "splits"] = {each.split_k for each in made._tilings.values()}
    assert torch.equal(found["whole"][:, part], found["part"])
    assert found["whole", "splits"] == found["part", "splits"] != found["alone", "splits"]
