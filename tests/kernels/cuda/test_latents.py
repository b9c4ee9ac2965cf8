"""Latent attention by Triton's kernels: against plain torch, and compiled for GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from device_weights import random
from triton_tools import EACH_ARCH, SHARED_LIMIT, launches

from octavo.kernels.cuda.attention import GpuAttention
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu, HeadShape, StepTables
from octavo.kernels.cuda.latents import GpuLatents, LatentSizes, multiply_heads
from octavo.kernels.cuda.ops import LatentLayer, Rope, StepTensors
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.weights import DenseWeight
from octavo.kernels.kv_stores import KVStore, codecs_of
from octavo.kernels.op_arguments import RowNorm

BLOCK_SIZE, FEW_BYTES = 4, 16


def caches_of(kv, num_blocks, rank, rope_dim, device, block_size=BLOCK_SIZE):
    stores = []
    for codec, width in zip(codecs_of(kv, is_latent=True), (rank, rope_dim), strict=True):
        parts = [
            torch.zeros(num_blocks, block_size, 1, part.width, dtype=part.dtype, device=device)
            for part in codec.parts(width)
        ]
        stores.append(KVStore(codec, parts))
    return tuple(stores)


def step_of(sequences, device):
    """Of (length, new tokens), whose blocks follow each other, and a row that is none."""
    counts = [-(-length // BLOCK_SIZE) for length, _ in sequences]
    tables = torch.zeros(len(sequences) + 1, max(counts), dtype=torch.int32)
    first, positions, slots = 1, [], []
    for seq, ((length, new), count) in enumerate(zip(sequences, counts, strict=True)):
        tables[seq, :count] = torch.arange(first, first + count)
        places = torch.arange(length - new, length)
        positions.append(places)
        slots.append(tables[seq, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE)
        first += count
    start = torch.tensor([0, *(new for _, new in sequences), 0]).cumsum(0)
    lengths = torch.tensor([*(length for length, _ in sequences), 0])
    pad = torch.tensor([0])

    def tensor(x):
        return x.to(device, torch.int32)

    table = StepTables(tensor(tables), tensor(start), tensor(lengths))
    longest = max(new for _, new in sequences)
    places = tensor(torch.cat([*positions, pad])), tensor(torch.cat([*slots, pad - 1]))
    return StepTensors(places[0], places[0], [places[1]], [table], longest)


def layer_of(heads, rank, nope_dim, rope_dim, value_dim, device, interleaved=True):
    """A layer without caches."""
    kv_b = random(heads * (nope_dim + value_dim), rank, device=device, seed=5) / rank**0.5
    angles = random(200, rope_dim // 2, device=device, seed=6)
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=1), interleaved)
    norm = RowNorm(random(rank, device=device, seed=7), 1e-5)
    return LatentLayer(DenseWeight(kv_b), norm, rope, 0.2, None, None)


def with_caches(layer, caches):
    return replace(layer, latents=caches[0], rope_keys=caches[1])


def gpu_latents(layer, heads, step, num_tokens, dtype=torch.float32, gpu=None, **settings):
    rank, rope_dim = layer.kv_b.shape[1], layer.rope.cos_sin.shape[1]
    device = layer.kv_b.values.device
    shape = HeadShape.of_latents(
        torch.empty(0, heads, rank, dtype=dtype), layer.latents, layer.rope_keys
    )
    limits = AttentionLimits(len(step.tables[0].seq_lens), 4, 200)
    attention = GpuAttention([shape], limits, gpu or Gpu(90, 8), device, **settings)
    sizes = [LatentSizes(heads, rank, rope_dim)]
    return attention, GpuLatents(sizes, num_tokens, dtype, device, **settings)


def attend(step, q, ckv, caches, layer, **settings):
    layer = with_caches(layer, caches)
    attention, latents = gpu_latents(layer, q.shape[1], step, len(q), **settings)
    value_dim = layer.kv_b.shape[0] // q.shape[1] - (q.shape[2] - layer.rope.cos_sin.shape[1])
    out = torch.full((len(q), q.shape[1], value_dim), torch.nan, device=q.device)
    latents.attend(q, ckv, step, layer, attention, out)
    return out


def case(sequences, heads=6, rank=40, nope_dim=12, rope_dim=16, value_dim=10, device="cpu"):
    step = step_of(sequences, device)
    count = step.num_tokens
    # Both are columns of one product.
    joint = random(count, heads * (nope_dim + rope_dim) + rank + rope_dim, device=device)
    q, ckv = joint.split([heads * (nope_dim + rope_dim), rank + rope_dim], dim=1)
    layer = layer_of(heads, rank, nope_dim, rope_dim, value_dim, device, rank == 40)
    return step, q.unflatten(1, (heads, -1)), ckv, layer


def fill(caches, length, device):
    """What steps before have kept."""
    for seed, store in enumerate(caches):
        width = store.parts[0].shape[-1]
        slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + length, device=device)
        store.write(slots, random(length, 1, width, device=device, seed=seed))


STEPS = {
    "prompts": [(1, 1), (21, 21), (33, 9)],
    "decoding": [(1, 1), (150, 1), (70, 1)],
    "drafts": [(33, 3), (9, 2)],
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("kv", "tolerance"), [("float32", 2e-5), ("fp8", 2e-2), ("int8", 2e-2), ("bfloat16", 2e-3)]
)
def test_the_same_as_in_plain_torch(device, name, kv, tolerance):
    heads, rank = (18, 64) if name == "prompts" else (6, 40)
    step, q, ckv, layer = case(STEPS[name], heads, rank, device=device)
    ours, theirs = (caches_of(kv, 80, rank, 16, device) for _ in range(2))
    for caches in (ours, theirs):
        fill(caches, 300, device)
    got = attend(step, q, ckv, ours, layer)
    expected = torch.full_like(got, torch.nan)
    PlainOps().attend_latents(q, ckv, step, with_caches(layer, theirs), expected)
    real = slice(0, step.num_tokens - 1)
    assert (got[real] - expected[real]).abs().max() <= tolerance * expected[real].abs().max()
    for own, other in zip(ours, theirs, strict=True):
        if kv == "float32":
            torch.testing.assert_close(own.parts[0], other.parts[0])
        difference = own.codec.decode(*own.parts).float() - other.codec.decode(*other.parts).float()
        assert difference.abs().max() <= 0.1


def test_a_token_has_the_same_bits_in_any_company(device):
    step, q, ckv, layer = case([(40, 20), (70, 1), (33, 3)], device=device)
    caches = caches_of("float32", 80, 40, 16, device)
    fill(caches, 300, device)
    together = attend(step, q, ckv, caches, layer, is_invariant=True)
    tables = step.tables[0]
    alone = StepTables(
        tables.block_tables[1:2],
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        tables.seq_lens[1:2],
    )
    of_one = StepTensors(
        step.token_ids[20:21], step.positions[20:21], [step.slots[0][20:21]], [alone], 1
    )
    got = attend(of_one, q[20:21], ckv[20:21], caches, layer, is_invariant=True)
    assert torch.equal(got[0], together[20])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_products_of_heads(device, transposed, rows):
    x = random(21, 3, 70 + 5, device=device)[..., 5:]
    weight = random(3, 70, 90, device=device).transpose(1, 2)
    if not transposed:
        weight = weight.contiguous()
    out = torch.full((21, 3, 90), torch.nan, device=device)
    multiply_heads(x, weight, out, rows)
    torch.testing.assert_close(out, torch.einsum("thk,hnk->thn", x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("arch", EACH_ARCH)
@pytest.mark.parametrize("kv", ["bfloat16", pytest.param("fp8", marks=pytest.mark.long)])
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_invariant", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(("num_tokens", "max_query"), [(2, 1), (600, 512)])
def test_compiled(arch, kv, heads, is_invariant, num_tokens, max_query):
    """Of DeepSeek's size."""
    step = step_of([(4, 1)], "cpu")
    token = torch.zeros(num_tokens, dtype=torch.int32)
    step = StepTensors(token, token, [token], step.tables, max_query)
    caches = caches_of(kv, 3, 512, 64, "cpu", block_size=16)
    rope = Rope(torch.zeros(10, 64), True)
    kv_b = DenseWeight(torch.zeros(heads * 256, 512, dtype=torch.bfloat16))
    layer = LatentLayer(kv_b, RowNorm(torch.ones(512), 1e-5), rope, 0.1, *caches)
    settings = {"dtype": torch.bfloat16, "gpu": Gpu(arch, 132), "is_invariant": is_invariant}
    attention, latents = gpu_latents(layer, heads, step, num_tokens, **settings)
    q = torch.zeros(num_tokens, heads, 192, dtype=torch.bfloat16)
    ckv = torch.zeros(num_tokens, 576, dtype=torch.bfloat16)
    out = torch.zeros(num_tokens, heads, 128, dtype=torch.bfloat16)
    seen = launches(lambda: latents.attend(q, ckv, step, layer, attention, out))
    names = [launch.kernel.__name__ for launch in seen]
    assert names[:2] == ["_write", "_multiply_heads"] and names[-1] == "_multiply_heads"
    for launch in seen:
        made = launch.compiled(arch)
        assert made.spills <= FEW_BYTES and made.shared <= SHARED_LIMIT[arch], launch.key
