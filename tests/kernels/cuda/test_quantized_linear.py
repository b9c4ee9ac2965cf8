"""Weights of 4 bits: packed, dequantized, and multiplied, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from coded_weights import coded, scattered
from triton_tools import ARCHS, SHARED_LIMIT, launches

from octavo.kernels.cuda.packing import TILE_K, W4Weight, pack_w4
from octavo.kernels.cuda.quantized_linear import (
    MAX_ROWS,
    dequantize_w4,
    linear_w4,
    w4_tiling,
)
from octavo.kernels.cuda.splits import Workspace
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType, row_bytes

DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]


def blocks(type_, n, k):
    """Random blocks of GGUF's, with scales and mins that are small."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (n, row_bytes(type_, k)), dtype=np.uint8)
    of_block = data.reshape(n, k // 32, -1)
    halves = rng.uniform(-0.02, 0.02, (n, k // 32, of_block.shape[2] // 2 - 8))
    of_block[..., :-16] = halves.astype(np.float16).view(np.uint8)
    return StoredWeight(type_, data, (n, k))


WEIGHTS = {
    "Q4_0": lambda: blocks(GGMLType.Q4_0, 70, 576),
    "Q4_1": lambda: blocks(GGMLType.Q4_1, 64, 1184),
    "groups of 32": lambda: coded(40, 96, 4, 32),
    "groups of 64": lambda: coded(100, 1216, 4, 64, zeros=8.0),
    "groups of 128": lambda: coded(65, 1280, 4, 128),
    "a scale for a row": lambda: coded(16, 1024, 4, 1024, zeros=8.0),
}


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype)


def dequantized(weight: W4Weight) -> torch.Tensor:
    """What the words, scales and mins of a weight say, read one by one: float32 [N, K]."""
    n, k = weight.shape
    inputs = torch.arange(k)
    rows = inputs // TILE_K * 16 + inputs % 16
    planes = inputs % TILE_K // 16
    codes = (weight.words.cpu()[rows] >> 4 * planes[:, None]) & 15
    scales = weight.scales.cpu().float()[inputs // weight.group]
    if weight.mins is None:
        return ((codes - 8) * scales).t()
    return (codes * scales + weight.mins.cpu().float()[inputs // weight.group]).t()


def run(x, weight, split, **settings):
    tiling = w4_tiling(*weight.shape, 8)
    if not split:
        tiling = replace(tiling, splits=1, split_k=tiling.splits * tiling.split_k)
    workspace = Workspace.for_all([tiling], x.device)
    workspace.parts.fill_(torch.nan)
    out = torch.full((len(x), weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    linear_w4(x, weight, out, tiling, workspace, **settings)
    assert not workspace.counters.any()
    return out


def assert_near(got, expected, tolerance):
    error = (got.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max()  # and no NaN


@pytest.mark.parametrize("name", WEIGHTS)
def test_packed_weights_are_the_numbers_of_the_file(name):
    weight = WEIGHTS[name]()
    packed = pack_w4(weight, "cpu")
    expected = torch.from_numpy(weight.dequantize())
    if isinstance(weight, StoredWeight) or packed.mins is None:
        assert torch.equal(dequantized(packed), expected)
    else:  # -scale * zero as float16
        largest = packed.mins.abs().max().item()
        assert torch.allclose(dequantized(packed), expected, rtol=0, atol=largest * 2**-11)
    assert packed.shape == weight.shape and packed.group in (32, 64, 128)
    assert packed.words.shape == (-(-weight.shape[1] // TILE_K) * 16, weight.shape[0])


@pytest.mark.parametrize(
    "weight",
    [
        blocks(GGMLType.Q8_0, 4, 64),
        coded(4, 64, 8, 32),
        coded(4, 64, 4, 16),
        coded(4, 64, 4, 32, levels=np.linspace(-1, 1, 16, dtype=np.float32), zeros=0.0),
        scattered(coded(4, 64, 4, 32), np.arange(64) % 2),
    ],
    ids=["Q8_0", "8 bits", "groups of 16", "looked up", "scattered"],
)
def test_other_weights_are_not_packed(weight):
    assert pack_w4(weight, "cpu") is None


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in DTYPES])
def test_dequantized(device, name, dtype):
    weight = pack_w4(WEIGHTS[name](), device)
    n, k = weight.shape
    out = torch.full((k, n), torch.nan, dtype=dtype, device=device)
    dequantize_w4(weight, out)
    expected = dequantized(weight).t()
    if dtype == torch.bfloat16:  # cut off by the interpreter
        assert torch.allclose(out.cpu().float(), expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(out.cpu(), expected.to(dtype))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("split", [False, True])
def test_products(device, name, split):
    weight = pack_w4(WEIGHTS[name](), device)
    n, k = weight.shape
    assert (w4_tiling(n, k, 8).splits > 1) == (k > 1000)
    bias = random(n, device=device, seed=1)
    for rows, (dtype, tolerance) in zip([1, 5, 33], DTYPES, strict=True):
        x = random(rows, 3 + k, dtype=dtype, device=device)[:, 3:]
        expected = x.double() @ dequantized(weight).double().to(device).T + bias
        assert_near(run(x, weight, split, bias=bias), expected, tolerance)


def test_a_row_has_the_same_bits_in_any_company(device):
    weight = pack_w4(WEIGHTS["groups of 128"](), device)
    x = random(MAX_ROWS, weight.shape[1], device=device)
    together = run(x, weight, True)
    assert torch.equal(run(x[40:41], weight, True)[0], together[40])
    assert torch.equal(run(x[7:29], weight, True), together[7:29])


def empty_weight(n, k, group, has_mins):
    scales = torch.empty(k // group, n, dtype=torch.float16)
    words = torch.empty(k // 8, n, dtype=torch.int32)
    return W4Weight(words, scales, scales if has_mins else None, group, (n, k))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rows", "group"), [(3, 32), (32, 128), (64, 32)])
def test_compiled(arch, rows, group):
    weight = empty_weight(1024, 1024, group, has_mins=group == 128)
    tiling = w4_tiling(*weight.shape, 132)
    workspace = Workspace.for_all([tiling], "cpu")
    x = torch.empty(rows, 1024, dtype=torch.bfloat16)
    (launch,) = launches(lambda: linear_w4(x, weight, x, tiling, workspace))
    made = launch.compiled(arch)
    assert made.spills == 0 and made.registers <= (128 if rows < 64 else 192)
    assert made.shared <= SHARED_LIMIT[arch] // (2 if rows < 64 else 1)
    is_large = rows == 64 and arch >= 90
    words = {90: "wgmma.mma_async", 100: "tcgen05.mma"} if is_large else {}
    assert words.get(arch, "mma.sync") in made.ptx and "cp.async" in made.ptx


@pytest.mark.parametrize("arch", ARCHS)
def test_dequantization_compiled(arch):
    weight = empty_weight(1024, 1024, 128, has_mins=True)
    out = torch.empty(1024, 1024, dtype=torch.bfloat16)
    (launch,) = launches(lambda: dequantize_w4(weight, out))
    made = launch.compiled(arch)
    assert made.spills == 0 and made.registers <= 64
    assert "st.global.v4" in made.ptx  # 16 bytes at a time
