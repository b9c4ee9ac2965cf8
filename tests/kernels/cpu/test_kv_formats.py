"""The formats of the KV cache with scales: native kernels against the reference ops, and how much
of attention they keep."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from native_attention import FORMATS, Cache, Layer, Step, attend, expected, make_sequence

from octavo.kernels.cpu import layout

torch = pytest.importorskip("torch")

from octavo.kernels import reference  # noqa: E402
from octavo.kernels.kv_stores import CODECS, KVStore, padded_codec  # noqa: E402

SCALED = ["int8", "fp8", "int4", "k8v4"]


def stores(kv: str, layer: Layer, num_blocks: int) -> tuple[KVStore, KVStore]:
    shape = (num_blocks, layer.block_size, layer.kv_heads)
    keys, values = (
        KVStore(codec, [torch.zeros(*shape, p.width, dtype=p.dtype) for p in parts])
        for codec in (padded_codec(codec, layer.dim) for codec in CODECS[kv])
        for parts in [codec.parts(layer.dim)]
    )
    return keys, values


@pytest.mark.parametrize("kv", SCALED)
@pytest.mark.parametrize("dim", [8, 15, 16, 24, 40, 48, 64, 100, 112, 256, 288, 512])
def test_the_reference_ops_store_the_same(native, kv, dim):
    """To the bit: the same codes, the same scales."""
    layer = Layer(kv=kv, dim=dim, rotary=0)
    sequence = make_sequence(layer, 75, 6)
    sequence.k[3:5] *= 1e-4
    sequence.k[7] = sequence.v[9] = 0
    sequence.v[11] = -2.5
    sequence.v[20:30] += 40
    cache = Cache(native, layer, [sequence])
    for start, count in [(0, 20), (20, 1), (21, 1), (22, 53)]:
        attend(cache, [(0, start, count)])
    keys, values = cache.read(0, 75)

    stored = stores(kv, layer, 3)
    rows = torch.arange(75 * layer.kv_heads)
    for store, wrote, read in zip(stored, (sequence.k, sequence.v), (keys, values), strict=True):
        store.write(torch.arange(75), torch.from_numpy(wrote))
        assert np.array_equal(store.read(rows).view(75, layer.kv_heads, dim).numpy(), read)


@pytest.mark.parametrize("kv", SCALED)
@pytest.mark.parametrize("dim", [8, 64, 100, 320])
def test_the_reference_ops_attend_nearly_the_same(native, kv, dim):
    """They round no queries."""
    layer = Layer(kv=kv, dim=dim, rotary=0, window=90, sinks=True)
    length = 150
    sequence = make_sequence(layer, length, 3)
    (out,) = attend(Cache(native, layer, [sequence]), [(0, 0, length)])

    q, k, v = (torch.from_numpy(getattr(sequence, name)) for name in "qkv")
    caches = stores(kv, layer, 5)
    reference.store_kv(k, v, *caches, torch.arange(length))
    plan = reference.plan_attention(
        torch.arange(5, dtype=torch.int32)[None],
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        length,
        length,
        layer.block_size,
    )
    sinks = torch.from_numpy(layer.weights()["sinks"])
    wanted = reference.paged_attention(
        q, *caches, plan, layer.scale, layer.window, None, sinks
    ).numpy()
    error = np.abs(out - wanted).max() / np.abs(wanted).max()
    print(f"relative error {error:.1e}")
    assert error < (1e-5 if kv == "fp8" else 0.02)


@pytest.mark.parametrize(
    "kv, most", [("bf16", 5e-3), ("int8", 0.025), ("fp8", 0.11), ("k8v4", 0.1), ("int4", 0.3)]
)
def test_how_much_is_lost(native, kv, most):
    """With a dimension of the keys that is 20 times the others, as models have them.
    Half as much would be a mistake of the test, or a better format."""
    layer = Layer(kv=kv, dim=64, rotary=0)
    sequence = make_sequence(layer, 200, 2)
    sequence.k[..., 7] += 20
    sequence.q[..., 7] /= 20
    (out,) = attend(Cache(native, layer, [sequence]), [(0, 0, 200)])
    exact = expected(replace(layer, kv="f32"), sequence, sequence.k, sequence.v)
    error = np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean())
    print(f"relative error {error:.2e}")
    assert most / 2 < error < most


@pytest.mark.parametrize("kv", FORMATS)
def test_one_key_among_4096_is_found(native, kv):
    """Queries that are each the key of one position, near the beginning, the middle and the end:
    what they get is its value."""
    layer = Layer(kv=kv, heads=1, kv_heads=1, dim=64, rotary=0, block_size=64)
    depths = [0, 17, 511, 1023, 2050, 3333, 4000, 4087]
    length = 4096
    sequence = make_sequence(layer, length, 8)
    sequence.q[-len(depths) :, 0] = 3 * sequence.k[depths, 0]
    cache = Cache(native, layer, [sequence])
    for start in range(0, length, 512):  # only stored: their queries see themselves
        step = Step(cache, [(0, start, 512)])
        step.args.window = 1
        lib = native.lib
        native.check(
            lib.oct_attention(native.pool, ctypes.byref(step.args), ctypes.byref(step.seqs))
        )
    (out,) = attend(cache, [(0, length - len(depths), len(depths))])
    _, values = cache.read(0, length)
    nearest = [int(np.square(values[:, 0] - row).sum(-1).argmin()) for row in out[:, 0]]
    assert nearest == depths
    assert np.abs(out[:, 0] - values[depths, 0]).max() < 0.1


@pytest.mark.parametrize("kv", SCALED)
def test_bytes_of_a_token(kv, native):
    """As tensors, as planned without them, and in the native kernels."""
    for dim in (8, 15, 16, 48, 64, 100, 112, 128, 256, 512):
        planned = layout.kv_token_bytes(kv, dim)
        parts = [p for codec in CODECS[kv] for p in padded_codec(codec, dim).parts(dim)]
        assert sum(part.width * part.dtype.itemsize for part in parts) == planned
        size = layout.padded_head(dim)
        assert native.lib.oct_kv_chunk_bytes(FORMATS[kv], size) == layout.KV_CHUNK * planned
    assert layout.kv_token_bytes("int4", 64) == 80 < layout.kv_token_bytes("int8", 64) / 1.6
