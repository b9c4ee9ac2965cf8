"""The reference ops: what they compute, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import stored

from octavo.kernels import reference
from octavo.kernels.kv_stores import FloatCodec, KVStore
from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.tensors import BlockTensor, to_torch

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = ["cpu", CUDA]


def random(*shape, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def random_quantized(type, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, row_bytes(type, columns))
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    weight = BlockTensor(type, data, (rows, columns))
    # Random scales include NaN, infinity and huge numbers; keep to blocks of sane ones.
    blocks = data.view(-1, row_bytes(type, 32))
    blocks[:, 1] = blocks[:, 1] & 0x83 | 0x28
    if type == GGMLType.Q4_1:
        blocks[:, 3] = blocks[:, 3] & 0x83 | 0x28
    assert dequantize(type, data).isfinite().all()
    return weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear(device, dtype):
    x, weight = random(37, 96, device=device, dtype=dtype), random(50, 96, seed=1, device=device)
    bias = random(50, seed=2, device=device)
    expected = x.double() @ weight.double().T + bias.double()
    for kept in (torch.float32, torch.float16, torch.bfloat16):
        got = reference.linear(x, weight.to(kept), bias)
        assert got.dtype == dtype and got.shape == (37, 50)
        tolerance = 1e-6 if dtype == kept == torch.float32 else 1e-2
        assert (got.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type", [GGMLType.Q4_1, GGMLType.Q8_0])
def test_linear_and_embed_of_quantized_weights(type, device, monkeypatch):
    # Pieces of few rows, so that the last one is a smaller one.
    monkeypatch.setattr(reference, "_CHUNK_VALUES_CPU", 20 * 64)
    weight = to_torch(stored(random_quantized(type, 50, 64)), device)
    dense = weight.dequantize()
    x = random(5, 64, device=device)
    assert torch.allclose(reference.linear(x, weight), x @ dense.T, rtol=1e-5, atol=1e-3)
    assert torch.allclose(reference.lm_head(x, weight), x @ dense.T, rtol=1e-5, atol=1e-3)
    ids = torch.tensor([3, 3, 49, 0], device=device)
    assert torch.equal(reference.embed(ids, weight), dense[ids])


def test_lm_head_computes_in_float32():
    hidden = random(3, 256, dtype=torch.bfloat16)
    weight = random(40, 256, seed=1, dtype=torch.bfloat16)
    logits = reference.lm_head(hidden, weight)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, hidden.float() @ weight.float().T, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise(device, dtype):
    gate = random(6, 70, device=device, dtype=dtype) * 4
    up = random(6, 70, seed=1, device=device, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02}
    wide_gate, wide_up = gate.double(), up.double()
    for got, expected in (
        (reference.silu_mul(gate, up), F.silu(wide_gate) * wide_up),
        (reference.gelu_mul(gate, up), F.gelu(wide_gate, approximate="tanh") * wide_up),
        (reference.gelu_mul(gate, up, approximate=False), F.gelu(wide_gate) * wide_up),
        (reference.softcap(gate, 3.0), 3 * torch.tanh(wide_gate / 3)),
        (reference.add(gate, up), wide_gate + wide_up),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, **{"atol": 0.02, **tolerance})


def test_silu_at_the_ends():
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30])
    assert reference.silu_mul(gate, torch.ones(5)).tolist() == [0, 0, 0, 100, gate[4].item()]


@pytest.mark.parametrize("device", DEVICES)
def test_rmsnorm(device):
    x, weight = random(2, 3, 40, device=device), random(40, seed=1, device=device)
    expected = x * (x.pow(2).mean(-1, keepdim=True) + 0.5).rsqrt() * weight
    torch.testing.assert_close(reference.rmsnorm(x, weight, 0.5), expected)
    assert reference.rmsnorm(x.bfloat16(), weight, 0.5).dtype == torch.bfloat16


def test_embed_scales_in_the_dtype_of_activations():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ids = torch.tensor([1])
    assert reference.embed(ids, weight, 10.0).tolist() == [[30, 40]]
    scale = math.sqrt(3072)  # 55.4256, but 55.5 in bfloat16, which is what Gemma was trained with
    got = reference.embed(ids, weight, scale, dtype="bfloat16")
    assert got.tolist() == (torch.tensor([[3 * 55.5, 4 * 55.5]]).bfloat16()).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rope_turns_pairs_as_complex_numbers(interleaved, rotary, device):
    q, k = random(5, 4, 16, device=device), random(5, 2, 16, seed=1, device=device)
    angles = random(9, rotary // 2, seed=2, device=device)
    positions = torch.tensor([0, 8, 3, 3, 1], device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    turn = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    for x, got in zip((q, k), reference.rope(q, k, positions, cos_sin, interleaved), strict=True):
        pairs = x[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        turned = torch.complex(first, second) * turn
        stacked = torch.stack([turned.real, turned.imag], dim=-1 if interleaved else -2)
        expected = torch.cat([stacked.flatten(-2), x[..., rotary:]], dim=-1)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_store_kv(device):
    k_cache = torch.zeros(4, 2, 1, 3, device=device)
    v_cache = torch.zeros(4, 2, 1, 3, device=device, dtype=torch.bfloat16)
    k = torch.arange(6.0, device=device).view(2, 1, 3)
    caches = [KVStore(FloatCodec(memory.dtype), [memory]) for memory in (k_cache, v_cache)]
    reference.store_kv(k, k + 10, *caches, torch.tensor([5, 0], device=device))
    assert k_cache.view(8, 3)[5].tolist() == [0, 1, 2] and k_cache[0, 0, 0].tolist() == [3, 4, 5]
    assert v_cache.view(8, 3)[5].tolist() == [10, 11, 12]
    assert k_cache[1].count_nonzero() == k_cache[3].count_nonzero() == 0


# Bitwise batch invariance -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 70),
    width=st.sampled_from([32, 64, 96, 576, 640, 1000]),
    data=st.data(),
)
def test_a_row_alone_gives_the_same_bits(seed, rows, width, data):
    row = data.draw(st.integers(0, rows - 1))
    x, up = random(rows, width, seed=seed) * 3, random(rows, width, seed=seed + 1)
    weight, vector = random(48, width, seed=2), random(width, seed=3)
    half = random(48, width, seed=2).half()
    alone, alone_up = x[row : row + 1], up[row : row + 1]
    for op in (
        lambda x, up: reference.linear(x, weight),
        lambda x, up: reference.linear(x, half, vector[:32].new_zeros(48)),
        lambda x, up: reference.lm_head(x, weight),
        lambda x, up: reference.rmsnorm(x, vector, 1e-5),
        reference.silu_mul,
        reference.gelu_mul,
        lambda x, up: reference.gelu_mul(x, up, approximate=False),
        lambda x, up: reference.softcap(x, 2.0),
    ):
        assert torch.equal(op(x, up)[row : row + 1], op(alone, alone_up))


def test_large_batches_are_cut_over_threads_without_a_trace():
    # Loops over this many values run in several threads, each with a tail of its own.
    x, up = random(67, 1531) * 3, random(67, 1531, seed=1)
    for op in (reference.silu_mul, reference.gelu_mul):
        whole = op(x, up)
        assert all(torch.equal(whole[i], op(x[i : i + 1], up[i : i + 1])[0]) for i in range(67))


@pytest.mark.parametrize("type", [GGMLType.Q4_1, GGMLType.Q8_0])
def test_quantized_linear_gives_the_same_bits(type):
    weight, x = random_quantized(type, 300, 576), random(40, 576)
    whole = reference.linear(x, weight)
    for start, stop in ((0, 1), (5, 6), (39, 40), (3, 20), (1, 40)):
        assert torch.equal(whole[start:stop], reference.linear(x[start:stop], weight))


def test_a_broken_row_harms_no_other():
    x, weight = random(20, 64), random(48, 64, seed=1)
    expected = reference.linear(x, weight)
    x[7] = math.nan
    got = reference.linear(x, weight)
    healthy = torch.arange(20) != 7
    assert torch.equal(got[healthy], expected[healthy]) and got[7].isnan().all()
