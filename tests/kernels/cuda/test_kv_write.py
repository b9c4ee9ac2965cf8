"""Norms, rotation and the writing of KV in one kernel, against the reference ops one by one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from octavo.kernels import reference
from octavo.kernels.cuda.attention_plan import Scoring
from octavo.kernels.cuda.kv_write import write_kv
from octavo.kernels.cuda.ops import AttentionLayer, HeadNorms, Rope
from octavo.kernels.kv_stores import CODECS, HadamardCodec, KVStore, hadamard_rotate


def empty_stores(kv, num_kv_heads, head_dim, device):
    """Of 96 slots; what is in them is no code of zero."""
    return tuple(
        KVStore(
            codec,
            [
                torch.full((12, 8, num_kv_heads, part.width), 77, device=device).to(part.dtype)
                for part in codec.parts(head_dim)
            ],
        )
        for codec in CODECS[kv]
    )


def numbers(num_tokens, heads, head_dim, dtype, device):
    x = torch.randn(num_tokens, heads * head_dim, generator=torch.Generator().manual_seed(1))
    x.view(num_tokens, heads, head_dim)[:, :, 3] *= 20  # as keys of models have it
    x[0] = 0
    x[1] *= 1e-4
    x[2] = -2.5
    return x.to(dtype).to(device)


def table(rotary, device):
    angles = torch.arange(50.0)[:, None] / 10 ** torch.linspace(0, 3, rotary // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def expected_of(qkv, positions, slots, q_shape, kv, norms, rope):
    """Queries and stores, by the reference ops."""
    num_tokens, num_heads, head_dim = q_shape
    q, kv_heads = qkv.view(num_tokens, -1, head_dim).tensor_split([num_heads], dim=1)
    k, v = kv_heads.chunk(2, dim=1)
    if norms is not None:
        q = reference.rmsnorm(q, norms.q, norms.eps)
        k = reference.rmsnorm(k, norms.k, norms.eps)
    if rope is not None:
        q, k = reference.rope(q, k, positions, rope.cos_sin, rope.interleaved)
    stores = empty_stores(kv, k.shape[1], head_dim, qkv.device)
    is_written = slots >= 0
    reference.store_kv(k[is_written], v[is_written], *stores, slots[is_written])
    if isinstance(stores[0].codec, HadamardCodec):
        q = (hadamard_rotate(q.float()) / (head_dim & -head_dim)).to(q.dtype)
    return q, stores


def check(device, kv="float32", dtype=torch.float32, heads=(6, 2), head_dim=64, num_tokens=5,
          norms=None, rope=None, tolerance=0.0):  # fmt: skip
    num_heads, num_kv_heads = heads
    qkv = numbers(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype, device)
    positions = torch.arange(num_tokens, device=device) * 3 % 50
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(2))[:num_tokens].to(device)
    slots[3] = -1  # a row that only fills up the batch
    stores = empty_stores(kv, num_kv_heads, head_dim, device)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
    write_kv(qkv, positions, slots, AttentionLayer(*stores, Scoring(1.0), norms, rope), q)
    wanted_q, wanted = expected_of(qkv, positions, slots, q.shape, kv, norms, rope)
    assert torch.allclose(q, wanted_q, rtol=tolerance, atol=tolerance)
    for store, other in zip(stores, wanted, strict=True):
        for part, wanted_part in zip(store.parts, other.parts, strict=True):
            assert torch.allclose(part, wanted_part, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32), (96, 96), (128, 64)])
def test_rope(device, head_dim, rotary, interleaved):
    check(device, head_dim=head_dim, rope=Rope(table(rotary, device), interleaved))


@pytest.mark.parametrize("kv", ["float16", "bfloat16"])
def test_floats_are_rounded_where_the_reference_rounds_them(device, kv):
    check(device, kv, getattr(torch, kv), rope=Rope(table(64, device)))


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [16, 80, pytest.param(256, marks=pytest.mark.long)])
def test_codes_are_the_same_to_the_bit(device, kv, head_dim):
    check(device, kv, torch.float16, head_dim=head_dim, rope=Rope(table(16, device)))


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_codes_of_many_tokens(device, kv):
    """Whose programs have several heads, some of which do not exist."""
    check(device, kv, head_dim=16, num_tokens=65, rope=Rope(table(16, device)))


def test_norms_of_heads(device):
    weights = torch.linspace(0.5, 2, 80, device=device)
    norms = HeadNorms(weights, weights.flip(0), 1e-6)
    check(device, head_dim=80, norms=norms, rope=Rope(table(80, device)), tolerance=1e-5)
    check(device, head_dim=80, norms=norms, tolerance=1e-5)


def test_neither_norm_nor_rope(device):
    check(device, heads=(9, 3))


def test_many_tokens(device):
    """Which takes programs of several heads."""
    check(device, heads=(9, 3), num_tokens=65, rope=Rope(table(64, device)))
