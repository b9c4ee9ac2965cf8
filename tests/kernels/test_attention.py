"""Paged attention against a dense softmax, and its independence of everything but the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import attention
from octavo.kernels.kv_stores import FloatCodec, KVStore
from octavo.kernels.reference import paged_attention, plan_attention, store_kv

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Sequence:
    """Queries, keys and values of a whole sequence; a step computes the last ``num_new``."""

    def __init__(self, q, k, v, num_new):
        self.q, self.k, self.v, self.num_new = q, k, v, num_new

    def __repr__(self):
        return f"Sequence({[*self.q.shape]}, {[*self.k.shape]}, num_new={self.num_new})"

    @staticmethod
    def random(length, num_new, heads, kv_heads, head_dim, seed, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((length, heads), (length, kv_heads), (length, kv_heads))
        q, k, v = (torch.randn(*s, head_dim, generator=generator).to(device) for s in shapes)
        return Sequence(q * 8 / head_dim**0.5, k, v, num_new)

    def part(self, length, num_new):
        return Sequence(self.q[:length], self.k[:length], self.v[:length], num_new)


@dataclass
class Options:
    scale: float = 0.3
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def arguments(self):
        return self.scale, self.window, self.softcap, self.sinks


def paged(sequences, block_size, options, seed=0, dtype=torch.float32, parents=None):
    """The step's output for each sequence; blocks are shuffled, the rest is NaN."""
    device = sequences[0].q.device
    counts = [-(-len(s.k) // block_size) for s in sequences]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int()
    shape = (len(order), block_size, *sequences[0].k.shape[1:])
    k_cache, v_cache = (
        KVStore(FloatCodec(dtype), [torch.full(shape, math.nan, device=device, dtype=dtype)])
        for _ in range(2)
    )
    tables = torch.full((len(sequences), max(counts)), int(order[-1]), dtype=torch.int32)
    for row, (sequence, blocks) in enumerate(
        zip(sequences, order[: sum(counts)].split(counts), strict=True)
    ):
        tables[row, : len(blocks)] = blocks
        place = torch.arange(len(sequence.k))
        slots = blocks.long()[place // block_size] * block_size + place % block_size
        store_kv(sequence.k, sequence.v, k_cache, v_cache, slots.to(device))
    new = [s.num_new for s in sequences]
    plan = plan_attention(
        tables.to(device),
        torch.tensor([0, *new]).cumsum(0).int().to(device),
        torch.tensor([len(s.k) for s in sequences], dtype=torch.int32, device=device),
        max(new),
        max(len(s.k) for s in sequences),
        block_size,
        None if parents is None else torch.tensor(parents, dtype=torch.int32, device=device),
    )
    q = torch.cat([s.q[len(s.q) - s.num_new :] for s in sequences]).to(dtype)
    out = paged_attention(q, k_cache, v_cache, plan, *options.arguments())
    assert out.shape == q.shape and out.dtype == dtype and out.is_contiguous()
    return list(out.split(new))


def dense(sequence, options):
    """The same for one sequence, in float64, with one softmax over all keys."""
    length, group = len(sequence.k), sequence.q.shape[1] // sequence.k.shape[1]
    q = sequence.q[length - sequence.num_new :].double()
    k = sequence.k.double().repeat_interleave(group, dim=1)
    v = sequence.v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    distance = torch.arange(length - sequence.num_new, length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    scores = scores.masked_fill(hidden.to(q.device), -math.inf)
    if options.sinks is not None:
        sinks = options.sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v)


SHAPES = st.tuples(
    st.integers(1, 9),  # query heads for a key head
    st.sampled_from([1, 2, 3]),  # key heads
    st.sampled_from([64, 80, 96, 128, 256]),
)


@st.composite
def options_for(draw, heads):
    window = draw(st.sampled_from([None, None, 1, 5, 64, 65, 100]))
    softcap = draw(st.sampled_from([None, None, 2.0, 20.0]))
    sinks = None
    if draw(st.booleans()):
        sinks = torch.linspace(-2, 3, heads)
    return Options(window=window, softcap=softcap, sinks=sinks)


@st.composite
def steps(draw):
    group, kv_heads, head_dim = draw(SHAPES)
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=6))
    sequences = []
    for i, length in enumerate(lengths):
        num_new = draw(st.one_of(st.just(1), st.integers(1, length), st.just(length)))
        heads = group * kv_heads
        sequences.append(Sequence.random(length, num_new, heads, kv_heads, head_dim, seed=i))
    return sequences, draw(options_for(group * kv_heads))


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from([1, 4, 16, 32]))
def test_agrees_with_a_dense_softmax(step, block_size):
    sequences, options = step
    for got, sequence in zip(paged(sequences, block_size, options), sequences, strict=True):
        assert (got - dense(sequence, options)).abs().max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_the_bits_depend_on_the_sequence_alone(step, data):
    sequences, options = step
    together = paged(sequences, data.draw(st.sampled_from([1, 4, 16, 32])), options)
    index = data.draw(st.integers(0, len(sequences) - 1))
    sequence, length = sequences[index], len(sequences[index].k)

    # Alone, in other blocks, and with its new tokens cut into chunks.
    chunks, end = [], length
    while end > length - sequence.num_new:
        size = data.draw(st.integers(1, sequence.num_new - (length - end)))
        chunks.append((end, size))
        end -= size
    block_size = data.draw(st.sampled_from([1, 4, 16, 32]))
    alone = [
        paged([sequence.part(end, size)], block_size, options, seed=1)[0]
        for end, size in reversed(chunks)
    ]
    assert torch.equal(torch.cat(alone), together[index])


def test_groups_and_ranges_of_tiles_leave_no_trace(monkeypatch):
    sequences = [
        Sequence.random(length, num_new, 6, 2, 32, seed=length)
        for length, num_new in ((700, 3), (40, 40), (1, 1), (333, 20), (64, 1), (65, 30))
    ]
    for options in (Options(), Options(window=90)):
        expected = paged(sequences, 16, options)
        for tiles in (1, 2, 5):
            monkeypatch.setattr(attention, "_TILES_AT_ONCE", tiles)
            monkeypatch.setattr(attention, "_KEPT_INDICES", 0)
            for got, wanted in zip(paged(sequences, 16, options), expected, strict=True):
                assert torch.equal(got, wanted)


def test_a_plan_serves_layers_of_different_kinds():
    sequence = Sequence.random(100, 40, 4, 2, 32, seed=0)
    tables = torch.arange(7, dtype=torch.int32).view(1, 7)
    start, lengths = torch.tensor([0, 40]).int(), torch.tensor([100]).int()
    plan = plan_attention(tables, start, lengths, 40, 100, 16)
    assert (plan.max_query_len, plan.max_seq_len) == (40, 100)
    caches = [KVStore(FloatCodec(torch.float32), [torch.zeros(7, 16, 2, 32)]) for _ in range(2)]
    store_kv(sequence.k, sequence.v, *caches, torch.arange(100))
    for _ in range(2):
        for options in (Options(), Options(window=20), Options(window=64)):
            got = paged_attention(sequence.q[60:], *caches, plan, *options.arguments())
            assert (got - dense(sequence, options)).abs().max() < 1e-5


def test_nan_and_large_scores_stay_where_they_are():
    sequences = [Sequence.random(n, n, 2, 1, 32, seed=n) for n in (70, 9)]
    expected = paged(sequences, 16, Options())
    sequences[0].v[0] = math.nan
    damaged, healthy = paged(sequences, 16, Options())
    assert damaged.isnan().all() and torch.equal(healthy, expected[1])
    sequences[1].q *= 1e4
    got = paged(sequences[1:], 16, Options())[0]
    assert (got - dense(sequences[1], Options())).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, device):
    sequences = [
        Sequence.random(n, new, 4, 2, 64, seed=n, device=device)
        for n, new in ((90, 90), (200, 1), (10, 3))
    ]
    for options in (Options(), Options(window=30, softcap=5.0)):
        for got, sequence in zip(
            paged(sequences, 16, options, dtype=dtype), sequences, strict=True
        ):
            error = (got.double() - dense(sequence, options)).abs()
            assert error.max() < 0.1 and error.mean() < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_float32_on_any_device(device):
    sequences = [
        Sequence.random(n, new, 6, 2, 80, seed=n, device=device)
        for n, new in ((90, 90), (200, 1), (10, 3))
    ]
    sinks = torch.linspace(-1, 1, 6, device=device)
    for options in (Options(), Options(window=30, softcap=5.0), Options(sinks=sinks)):
        for got, sequence in zip(paged(sequences, 16, options), sequences, strict=True):
            assert (got - dense(sequence, options)).abs().max() < 1e-5


@st.composite
def trees(draw):
    """Sequences of known tokens and then a tree, or nothing, in the order of slots; and the parents
    of each tree, -1 for the last known token."""
    group, kv_heads, head_dim = draw(SHAPES)
    sequences, drafts = [], []
    for i, num_known in enumerate(draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))):
        count = draw(st.integers(0, 12))
        num_new = draw(st.integers(1, min(num_known, 20))) + count
        sequences.append(
            Sequence.random(num_known + count, num_new, group * kv_heads, kv_heads, head_dim, i)
        )
        drafts.append([draw(st.integers(-1, index - 1)) for index in range(count)])
    return sequences, drafts, draw(options_for(group * kv_heads))


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([1, 4, 16, 32]))
def test_a_row_of_a_tree_sees_its_path_alone(step, block_size):
    """To the bit."""
    sequences, drafts, options = step
    parents = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        parents += [-1] * (sequence.num_new - len(draft))
        first = len(parents)
        parents += [first + parent for parent in draft]
    outs = paged(sequences, block_size, options, parents=parents)
    for sequence, draft, out in zip(sequences, drafts, outs, strict=True):
        num_known = len(sequence.k) - len(draft)
        known = sequence.part(num_known, sequence.num_new - len(draft))
        wanted = paged([known], block_size, options)[0]
        assert torch.equal(out[: known.num_new], wanted)
        paths = []
        for index, parent in enumerate(draft):
            paths.append([*(paths[parent] if parent >= 0 else ()), num_known + index])
            slots = [*range(num_known), *paths[-1]]
            alone = Sequence(sequence.q[slots], sequence.k[slots], sequence.v[slots], 1)
            wanted = paged([alone], block_size, options)[0]
            assert torch.equal(out[known.num_new + index], wanted[0])
