"""The attention kernels against the reference ops, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from paged_steps import PagedStep, Shape, paged_step

from octavo.kernels.cuda.attention import (
    AttentionInputs,
    GpuAttention,
    SplitScratch,
    attend_by_rows,
    attend_by_splits,
)
from octavo.kernels.cuda.attention_plan import (
    AttentionLimits,
    AttentionTiles,
    Cut,
    Gpu,
    HeadShape,
    Scoring,
    StepTables,
    scratch_size,
)
from octavo.kernels.cuda.ops import AttentionLayer
from octavo.kernels.kv_stores import KVStore

TILES = AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2)
ROWS = Cut(TILES)


def tables_of(step: PagedStep) -> StepTables:
    return StepTables(step.block_tables, step.query_start, step.seq_lens)


def inputs_of(step: PagedStep) -> AttentionInputs:
    return AttentionInputs.of_heads(step.turned_q, *step.caches)


def by_rows(step: PagedStep, scoring: Scoring, cut=ROWS):
    out = torch.full_like(step.q, torch.nan)
    attend_by_rows(inputs_of(step), tables_of(step), scoring, out, cut)
    return out


def split(step: PagedStep, num_splits=5, split_keys=0) -> Cut:
    heads, longest_query = HeadShape.of(step.q, *step.caches), int(step.query_start.diff().max())
    return Cut(TILES, num_splits, split_keys, heads.group * longest_query)


def scratch_of(step: PagedStep, cut: Cut) -> SplitScratch:
    heads = HeadShape.of(step.q, *step.caches)
    return SplitScratch.of(scratch_size(cut, heads, len(step.seq_lens)), step.q.device)


def by_splits(step: PagedStep, scoring: Scoring, cut=None, scratch=None):
    out = torch.full_like(step.q, torch.nan)
    cut = cut or split(step)
    scratch = scratch or scratch_of(step, cut)
    attend_by_splits(inputs_of(step), tables_of(step), scoring, out, cut, scratch)
    assert not scratch.counters.any()  # ready for the next layer
    return out


def options_of(scoring: Scoring):
    return {"window": scoring.window, "softcap": scoring.softcap, "sinks": scoring.sinks}


def check(step: PagedStep, scoring: Scoring, got, tolerance=2e-5):
    error = (got.float() - step.expected(scoring.scale, **options_of(scoring)).float()).abs()
    assert error.max() < tolerance  # and no NaN


RAGGED = [(1, 1), (40, 40), (30, 3), (70, 1), (33, 7)]
DECODES = [(1, 1), (70, 1), (130, 1)]
HEADS = [
    (1, 64), (2, 80), (3, 96), (4, 128), (5, 64), (6, 80), (7, 128), (8, 256), (9, 96), (16, 64),
]  # fmt: skip


@pytest.mark.parametrize(("group", "head_dim"), HEADS)
def test_rows_of_ragged_batches(device, group, head_dim):
    step = paged_step([(1, 1), (35, 9), (70, 2)], Shape(group, 1, head_dim), device)
    check(step, Scoring(0.1), by_rows(step, Scoring(0.1)))


@pytest.mark.parametrize(("group", "head_dim"), HEADS)
def test_splits_of_ragged_batches(device, group, head_dim):
    step = paged_step(DECODES, Shape(group, 1, head_dim), device, table_width=20)
    check(step, Scoring(0.1), by_splits(step, Scoring(0.1)))


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.1, window=1),
        Scoring(0.1, window=33),
        Scoring(0.1, softcap=2.0),
        Scoring(0.1, sinks=torch.linspace(-3, 4, 6)),
        Scoring(0.1, window=40, softcap=5.0, sinks=torch.linspace(3, -2, 6)),
    ],
    ids=["window 1", "window", "softcap", "sinks", "all"],
)
def test_windows_softcaps_and_sinks(device, run, scoring):
    step = paged_step(RAGGED if run is by_rows else DECODES, Shape(), device, table_width=20)
    if scoring.sinks is not None:
        scoring = replace(scoring, sinks=scoring.sinks.to(device))
    check(step, scoring, run(step, scoring))


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize("window", [1, 33])
def test_blocks_that_left_a_window_are_not_looked_at(device, run, window):
    sequences = RAGGED if run is by_rows else DECODES
    step, scoring = paged_step(sequences, Shape(), device, table_width=20), Scoring(0.1, window)
    expected = run(step, scoring)
    damaged = step.block_tables[0, -1].item()
    for table, (length, new) in zip(step.block_tables, sequences, strict=True):
        table[: max(0, length - new - window + 1) // Shape().block_size] = damaged
    assert (step.block_tables[:, 0] == damaged).any()
    assert torch.equal(run(step, scoring), expected)


@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_blocks_of_other_sizes(device, block_size):
    step = paged_step(RAGGED, Shape(block_size=block_size), device)
    check(step, Scoring(0.1), by_rows(step, Scoring(0.1)))
    step = paged_step(DECODES, Shape(block_size=block_size), device)
    check(step, Scoring(0.1), by_splits(step, Scoring(0.1)))


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 2e-2)])
def test_floats_of_16_bits(device, run, dtype, tolerance):
    shape = Shape(kv=dtype, dtype=getattr(torch, dtype))
    step = paged_step(DECODES, shape, device)
    check(step, Scoring(0.1), run(step, Scoring(0.1)), tolerance)


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_codes_with_scales(device, run, kv, head_dim):
    step = paged_step(DECODES, Shape(kv=kv, head_dim=head_dim), device)
    check(step, Scoring(0.1), run(step, Scoring(0.1)), 5e-5)


@pytest.mark.parametrize("tokens", [2, 4, 5, 8])
def test_drafts_of_a_decode(device, tokens):
    """Chains of one length or another: a tile has rows for the longest."""
    shape = Shape(group=2, kv_heads=1)
    step = paged_step([(70, tokens), (40, 1), (130, tokens - 1)], shape, device)
    check(step, Scoring(0.1), by_splits(step, Scoring(0.1)))


def test_many_rows_of_a_decode(device):
    step = paged_step([(70, 16), (40, 1)], Shape(group=3, kv_heads=1), device)
    tiles = replace(TILES, rows=64)
    check(step, Scoring(0.1), by_splits(step, Scoring(0.1), Cut(tiles, 4, 0, saved_rows=48)))


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_context_over_many_splits(device, window):
    step = paged_step([(1000, 1), (17, 1), (513, 1)], Shape(kv_heads=1), device)
    cut = split(step, num_splits=7)
    scratch, scoring = scratch_of(step, cut), Scoring(0.1, window=window)
    for _ in range(2):  # layers of a step share the scratch
        check(step, scoring, by_splits(step, scoring, cut, scratch))


@pytest.mark.parametrize("run", [by_rows, by_splits])
def test_values_that_are_a_prefix_of_keys(device, run):
    """As latents are, whose last numbers are keys alone; all heads share one."""
    step = paged_step(DECODES, Shape(group=16, kv_heads=1, head_dim=96), device)
    keys = step.caches[0]
    (numbers,) = keys.parts
    padded = KVStore(keys.codec, [torch.cat([numbers[..., :64], 0 * numbers[..., 64:]], dim=-1)])
    expected = replace(step, caches=(keys, padded)).expected(0.1)[..., :64]
    latent = replace(step, caches=(keys, KVStore(keys.codec, [numbers[..., :64]])))
    out = torch.full_like(expected, torch.nan)
    cut = split(latent) if run is by_splits else ROWS
    inputs = AttentionInputs.of_heads(latent.q, *latent.caches)
    arguments = inputs, tables_of(latent), Scoring(0.1), out, cut
    if run is by_splits:
        attend_by_splits(*arguments, scratch_of(latent, cut))
    else:
        attend_by_rows(*arguments)
    assert torch.allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("run", [by_rows, by_splits])
def test_padding_is_neither_read_nor_written(device, run):
    """Sequences that fill up a captured batch are empty, or of one row and of length 0."""
    step = paged_step(DECODES, Shape(), device, table_width=20)
    expected = run(step, Scoring(0.1))
    nowhere = torch.full_like(step.block_tables[:2], 1 << 30)
    zeros, end = torch.zeros_like(step.seq_lens[:2]), step.query_start[-1:]
    padded = PagedStep(
        torch.cat([step.q, step.q[:2]]),
        step.caches,
        torch.cat([step.block_tables, nowhere]),
        torch.cat([step.query_start, end, end + 1]),
        torch.cat([step.seq_lens, zeros]),
    )
    got = run(padded, Scoring(0.1))
    assert torch.allclose(got[:3], expected, atol=1e-6) and got[3:].isnan().all()


def test_the_same_bits_in_any_company(device):
    """With a fixed split: alone or not, decoded or a part of a prompt, whole or in chunks."""
    shape, scoring = Shape(kv_heads=1), Scoring(0.1, window=150, softcap=8.0)

    def last(run, sequences, names, cut=None):
        step = paged_step(sequences, shape, device, names)
        at = step.query_start[1 + names.index(5)] - 1
        return run(step, scoring, cut or split(step, num_splits=7, split_keys=64))[at]

    expected = last(by_splits, [(200, 1)], [5])
    assert torch.equal(last(by_splits, [(400, 1), (200, 1), (9, 1)], [1, 5, 3]), expected)
    assert torch.equal(last(by_splits, [(200, 4), (70, 2)], [5, 1]), expected)
    for sequences in ([(200, 200)], [(30, 30), (200, 7)], [(200, 1), (90, 90)]):
        names = [5 if length == 200 else 8 for length, _ in sequences]
        assert torch.equal(last(by_rows, sequences, names, Cut(TILES, split_keys=64)), expected)
    assert torch.allclose(last(by_rows, [(200, 9)], [5], ROWS), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_each_time(device, dtype):
    """Whoever comes last."""
    if device != "cuda":
        pytest.skip("programs run one after the other here")
    shape = Shape(group=4, kv_heads=2, kv=dtype, dtype=getattr(torch, dtype))
    step = paged_step([(1000, 1), (130, 1), (513, 1), (64, 1)], shape, device)
    cut, scoring = split(step, num_splits=16), Scoring(0.1)
    scratch = scratch_of(step, cut)
    first = by_splits(step, scoring, cut, scratch)
    for _ in range(200):
        assert torch.equal(by_splits(step, scoring, cut, scratch), first)


def test_tables_that_are_parts_of_others(device):
    step = paged_step(DECODES, Shape(), device, table_width=20)
    expected = by_rows(step, Scoring(0.1)), by_splits(step, Scoring(0.1))
    wide = torch.cat([step.block_tables, torch.full_like(step.block_tables, 1 << 30)], dim=1)
    part = replace(step, block_tables=wide[:, :20])
    assert torch.equal(by_rows(part, Scoring(0.1)), expected[0])
    assert torch.equal(by_splits(part, Scoring(0.1)), expected[1])


LIMITS = AttentionLimits(max_num_seqs=4, max_query=4, max_seq_len=1024)
FEW = Gpu(arch=90, num_processors=8)


def attention_of(shape: Shape, device, is_invariant=False) -> GpuAttention:
    width, number_bytes, is_coded = shape.head_dim, shape.dtype.itemsize, shape.kv == "int8"
    kinds = [
        HeadShape(shape.group * heads, heads, width, width, number_bytes, is_coded)
        for heads in (shape.kv_heads, 1)
    ]
    return GpuAttention(kinds, LIMITS, FEW, torch.device(device), is_invariant)


def attended(attention: GpuAttention, step: PagedStep, scoring: Scoring, plan):
    out = torch.full_like(step.q, torch.nan)
    layer = AttentionLayer(*step.caches, scoring)
    attention.attend(step.turned_q, layer, tables_of(step), out, plan)
    return out


def test_a_captured_shape_serves_whatever_comes_in_it(device):
    """Of other lengths, up to the longest that there may be; and other layers beside."""
    shape = Shape(group=2)
    attention, scoring = attention_of(shape, device), Scoring(0.1)
    plan = attention.plan(num_seqs=3, max_query=1)
    for sequences in ([(1, 1), (2, 1), (3, 1)], [(1024, 1), (600, 1), (40, 1)]):
        for kv_heads in (2, 1):
            step = paged_step(sequences, replace(shape, kv_heads=kv_heads), device)
            check(step, scoring, attended(attention, step, scoring, plan))


def test_plans_of_prompts_drafts_and_single_tokens(device):
    shape = Shape(group=2)
    attention, scoring = attention_of(shape, device), Scoring(0.1)
    for sequences in ([(70, 1)], [(200, 3), (90, 4)], [(40, 30), (90, 1)]):
        step = paged_step(sequences, shape, device)
        plan = attention.plan(len(sequences), max(new for _, new in sequences))
        check(step, scoring, attended(attention, step, scoring, plan))


def test_a_sequence_beside_a_prompt_is_of_one_of_two_launches(device):
    """Of a few tokens: by splits, whatever the prompt is; nobody else writes its rows."""
    shape, scoring = Shape(group=2), Scoring(0.1, window=700)
    attention = attention_of(shape, device)
    step = paged_step([(900, 1), (40, 30), (300, 4), (64, 5)], shape, device)
    plan = attention.plan(4, 30)
    check(step, scoring, attended(attention, step, scoring, plan))
    cut = plan.cuts[HeadShape.of(step.q, *step.caches)]
    assert cut.few is not None and cut.few.saved_rows == 2 * 4
    is_few = torch.tensor([1] + [0] * 30 + [1] * 4 + [0] * 5, dtype=torch.bool, device=device)
    assert torch.equal(by_rows(step, scoring, cut).isnan().any(-1).any(-1), is_few)
    assert torch.equal(by_splits(step, scoring, cut.few).isnan().any(-1).any(-1), ~is_few)


@pytest.mark.parametrize(
    ("kv", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16")]
)
def test_invariant_plans_give_the_same_bits(device, kv, dtype):
    shape = Shape(group=2, kv_heads=1, kv=kv, dtype=getattr(torch, dtype))
    scoring = Scoring(0.1)
    attention = attention_of(shape, device, is_invariant=True)

    def last(sequences, names):
        step = paged_step(sequences, shape, device, names)
        plan = attention.plan(len(sequences), max(new for _, new in sequences))
        return attended(attention, step, scoring, plan)[step.query_start[1 + names.index(5)] - 1]

    expected = last([(700, 1)], [5])
    for sequences in ([(700, 1), (90, 1)], [(700, 3), (9, 2)], [(700, 30)], [(40, 40), (700, 1)]):
        names = [5 if length == 700 else 8 for length, _ in sequences]
        assert torch.equal(last(sequences, names), expected)
