"""The attention kernels against the reference ops, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from paged_steps import PagedStep, Shape, paged_step

from octavo.kernels.cuda.attention import (
    Tiles,
    decode_attention,
    paged_attention,
    split_scratch,
)
from octavo.kernels.cuda.ops import Scoring, StepTables

TILES = Tiles(rows=16, keys=32, num_warps=4, num_stages=2)


def tables_of(step: PagedStep) -> StepTables:
    return StepTables(step.block_tables, step.query_start, step.seq_lens)


def by_rows(step: PagedStep, scoring: Scoring, tiles=TILES, split_keys=0):
    out = torch.full_like(step.q, torch.nan)
    paged_attention(step.turned_q, *step.caches, tables_of(step), scoring, out, tiles, split_keys)
    return out


def scratch_of(step: PagedStep, tiles=TILES, num_processors=8, split_keys=0):
    keys = step.caches[0].parts[0]
    longest = step.block_tables.shape[1] * keys.shape[1]
    num_seqs, (*_, num_heads, head_dim) = len(step.seq_lens), keys.shape
    return split_scratch(
        num_seqs, num_heads, head_dim, longest, tiles, keys.device, num_processors, split_keys
    )


def by_splits(step: PagedStep, scoring: Scoring, tiles=TILES, scratch=None):
    out = torch.full_like(step.q, torch.nan)
    scratch = scratch or scratch_of(step, tiles)
    decode_attention(step.turned_q, *step.caches, tables_of(step), scoring, out, tiles, scratch)
    assert not scratch.counters.any()  # ready for the next layer
    return out


def options_of(scoring: Scoring):
    return {"window": scoring.window, "softcap": scoring.softcap, "sinks": scoring.sinks}


def check(step: PagedStep, scoring: Scoring, got, tolerance=2e-5):
    error = (got.float() - step.expected(scoring.scale, **options_of(scoring)).float()).abs()
    assert error.max() < tolerance  # and no NaN


RAGGED = [(1, 1), (40, 40), (30, 3), (70, 1), (33, 7)]
DECODES = [(1, 1), (70, 1), (130, 1)]
HEADS = [(1, 64), (2, 80), (3, 96), (4, 128), (5, 64), (6, 80), (7, 128), (8, 256), (9, 96)]


@pytest.mark.parametrize(("group", "head_dim"), HEADS)
def test_rows_of_ragged_batches(device, group, head_dim):
    step = paged_step([(1, 1), (35, 9), (70, 2)], Shape(group, 1, head_dim), device)
    check(step, Scoring(0.1), by_rows(step, Scoring(0.1)))


@pytest.mark.parametrize(("group", "head_dim"), HEADS)
def test_splits_of_ragged_batches(device, group, head_dim):
    step = paged_step(DECODES, Shape(group, 1, head_dim), device, table_width=20)
    assert scratch_of(step).num_splits > 1
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


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_blocks_of_other_sizes(device, block_size):
    step = paged_step(RAGGED, Shape(block_size=block_size), device)
    check(step, Scoring(0.1), by_rows(step, Scoring(0.1)))


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_floats_of_16_bits(device, run, dtype, tolerance):
    shape = Shape(kv=dtype, dtype=getattr(torch, dtype))
    step = paged_step(DECODES, shape, device)
    check(step, Scoring(0.1), run(step, Scoring(0.1)), tolerance)


@pytest.mark.parametrize("run", [by_rows, by_splits])
@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_codes_with_scales(device, run, kv, head_dim):
    step = paged_step(DECODES, Shape(kv=kv, head_dim=head_dim), device)
    check(step, Scoring(0.1), run(step, Scoring(0.1)), 5e-5)


def test_drafts_of_a_decode(device):
    step = paged_step([(70, 4), (40, 1), (130, 3)], Shape(), device, table_width=20)
    check(step, Scoring(0.1), by_splits(step, Scoring(0.1)))


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_context_over_many_splits(device, window):
    step = paged_step([(1000, 1), (17, 1), (513, 1)], Shape(kv_heads=1), device)
    scratch = scratch_of(step, num_processors=16)
    assert scratch.num_splits == 7
    scoring = Scoring(0.1, window=window)
    for _ in range(2):  # layers of a step share the scratch
        check(step, scoring, by_splits(step, scoring, scratch=scratch))


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

    def last(run, sequences, names, **kwargs):
        step = paged_step(sequences, shape, device, names)
        at = step.query_start[1 + names.index(5)] - 1
        return run(step, scoring, **kwargs)[at]

    def decoded(step, scoring):
        return by_splits(step, scoring, scratch=scratch_of(step, split_keys=64))

    expected = last(decoded, [(200, 1)], [5])
    assert torch.equal(last(decoded, [(400, 1), (200, 1), (9, 1)], [1, 5, 3]), expected)
    assert torch.equal(last(decoded, [(200, 4), (70, 2)], [5, 1]), expected)
    for sequences in ([(200, 200)], [(30, 30), (200, 7)], [(200, 1), (90, 90)]):
        names = [5 if length == 200 else 8 for length, _ in sequences]
        assert torch.equal(last(by_rows, sequences, names, split_keys=64), expected)
    assert torch.allclose(last(by_rows, [(200, 9)], [5]), expected, atol=1e-5)
