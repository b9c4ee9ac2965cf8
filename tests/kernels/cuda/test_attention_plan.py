"""How steps are cut, and the memory that it takes. Needs neither Triton nor a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.cuda.attention_plan import (
    INVARIANT_SPLIT,
    AttentionLimits,
    AttentionPlanner,
    Gpu,
    HeadShape,
    scratch_size,
)

LLAMA_8B = HeadShape(32, 8, 128, 128, number_bytes=2)
H100 = Gpu(arch=90, num_processors=132)
LIMITS = AttentionLimits(max_num_seqs=256, max_query=4, max_seq_len=1 << 15)


def planner_of(heads=LLAMA_8B, limits=LIMITS, gpu=H100, is_invariant=False) -> AttentionPlanner:
    return AttentionPlanner([heads], limits, gpu, is_invariant)


def cut_of(num_seqs, max_query, longest=None, **how):
    (cut,) = planner_of(**how).plan(num_seqs, max_query, longest).cuts.values()
    return cut


def test_a_lone_sequence_is_split_among_all_processors():
    assert cut_of(1, 1).num_splits == 33  # times 8 heads, two programs each
    assert cut_of(16, 1).num_splits == 3
    assert cut_of(128, 1).num_splits == 1


def test_splits_have_four_tiles_at_least():
    cut = cut_of(1, 1, longest=1024)
    assert cut.num_splits * 4 * cut.tiles.keys == 1024
    assert cut_of(1, 1, longest=10).num_splits == 1


def test_prompts_and_more_sequences_than_were_planned_go_by_rows():
    assert not cut_of(1, LIMITS.max_query + 1).num_splits
    assert not cut_of(LIMITS.max_num_seqs + 1, 1).num_splits


def test_few_tokens_beside_a_prompt_are_split_as_they_are_without_it():
    beside = cut_of(3, 2000)
    assert not beside.num_splits and beside.few == cut_of(3, 4)
    assert beside.few.num_splits == 11 and beside.few.tiles.rows == 16
    # A prompt alone has nobody beside it, and of many sequences each is a program anyway.
    assert cut_of(1, 2000).few is None and cut_of(200, 2000).few is None
    assert cut_of(3, 2000, longest=100).few is None
    short_chains = replace(LIMITS, max_query=2)
    assert cut_of(3, 2000, limits=short_chains).few.saved_rows == 2 * LLAMA_8B.group
    wide = replace(LLAMA_8B, num_heads=136)
    assert cut_of(3, 2000, heads=wide).few.saved_rows == 17


def test_rows_of_a_tile_are_those_of_the_longest_chain():
    limits = replace(LIMITS, max_query=32)
    assert [cut_of(1, n, limits=limits).tiles.rows for n in (1, 4, 5, 16)] == [16, 16, 32, 64]
    assert not cut_of(1, 17, limits=limits).num_splits


@pytest.mark.parametrize("group", [1, 3, 7, 16, 71])
def test_all_heads_of_a_group_are_in_one_tile(group):
    heads = HeadShape(2 * group, 2, 64, 64, number_bytes=2)
    for how in ({}, {"is_invariant": True}):
        for max_query in (1, 1000):
            assert cut_of(1, max_query, heads=heads, **how).tiles.rows >= group


def test_invariant_cuts_are_one_for_all():
    """But for whether programs share a sequence: the bits are the same."""
    cuts = [cut_of(n, q, is_invariant=True) for n in (1, 7, 256) for q in (1, 4, 1000)]
    assert len({(cut.tiles, cut.split_keys) for cut in cuts}) == 1
    assert cuts[0].split_keys == INVARIANT_SPLIT and INVARIANT_SPLIT % cuts[0].tiles.keys == 0
    assert [bool(cut.num_splits) for cut in cuts] == [True, True, False] + [True, True, False] + [
        False
    ] * 3


def test_what_is_split_does_not_depend_on_how_long_sequences_are():
    """But on how long they may be, for which there is scratch."""
    small = Gpu(arch=90, num_processors=1)
    for longest in (None, 513):
        assert not cut_of(2, 1, longest, gpu=small, is_invariant=True).num_splits


def test_scratch_of_a_model_of_8b():
    assert planner_of().scratch.num_bytes / 2**20 == pytest.approx(4.1, abs=0.1)
    assert planner_of(is_invariant=True).scratch.num_bytes / 2**20 == pytest.approx(34, abs=1)


@settings(deadline=None, max_examples=50)
@given(
    group=st.integers(1, 16),
    num_kv_heads=st.integers(1, 8),
    dims=st.sampled_from([(64, 64), (80, 80), (128, 128), (256, 256), (96, 64)]),
    is_coded=st.booleans(),
    is_invariant=st.booleans(),
    arch=st.sampled_from([80, 89, 90, 100, 120]),
    num_processors=st.integers(1, 150),
    max_num_seqs=st.integers(1, 12),
    max_query=st.integers(1, 16),
    max_seq_len=st.integers(1, 1 << 17),
    data=st.data(),
)
def test_scratch_is_enough_for_any_step(
    group, num_kv_heads, dims, is_coded, is_invariant, arch, num_processors, max_num_seqs,
    max_query, max_seq_len, data,
):  # fmt: skip
    heads = HeadShape(group * num_kv_heads, num_kv_heads, *dims, 2, is_coded)
    planner = planner_of(
        heads,
        AttentionLimits(max_num_seqs, max_query, max_seq_len),
        Gpu(arch, num_processors),
        is_invariant,
    )
    num_seqs = data.draw(st.integers(1, max_num_seqs + 1))
    query = data.draw(st.integers(1, max_query + 1))
    cut = planner.plan(num_seqs, query, data.draw(st.integers(1, max_seq_len))).cuts[heads]
    enough = planner.scratch
    for each in (cut, planner.plan(num_seqs, 1000).cuts[heads].few or cut):
        needed = scratch_size(each, heads, num_seqs)
        assert needed.num_floats <= enough.num_floats
        assert needed.num_counters <= enough.num_counters
    assert cut.saved_rows <= cut.tiles.rows and cut.tiles.rows >= group
    if cut.num_splits:
        assert query * group <= cut.saved_rows
