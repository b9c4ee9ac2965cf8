"""Parts of ranks by the scheme `sum`: all of it once, in whole units, in nested slices."""

from __future__ import annotations

from itertools import chain

import pytest
from fused_models import CONFIGS, LLAMA, random_model
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.fused_ops import CannotFuse, FusedAttention, FusedHead, FusedSum
from octavo.kernels.parts import Part
from octavo.kernels.sum_division import SumDivision
from octavo.kernels.sum_pieces import SLICES, key_heads, pieces_of
from octavo.runtime.op_program import plan_step

UNITS = st.sampled_from([(16, 1), (256, 256), (96, 32), (1, 1)])


@given(st.integers(1, 3000), UNITS, st.integers(2, 8))
def test_ranks_have_all_inputs_once_in_whole_units(size, units, num_ranks):
    pieces = [pieces_of(size, units, part, False) for part in Part(size=num_ranks).of_all_ranks()]
    if not pieces[0].is_divided:
        assert -(-size // units[-1]) < num_ranks
        assert all(each.ranges == (range(size),) for each in pieces)
        return
    assert [*chain(*(each.own for each in pieces))] == [*range(size)]
    assert all(each.own and each.own.start % units[-1] == 0 for each in pieces)


@given(st.integers(1, 3000), UNITS)
def test_canonical_slices_are_those_of_one_rank(size, units):
    (alone,) = (pieces_of(size, units, Part(), True),)
    assert [*chain(*alone.ranges)] == [*range(size)]
    assert len(alone.ranges) in (1, 2, 4, SLICES)
    for num_ranks in (2, 4, 8):
        parts = Part(size=num_ranks).of_all_ranks()
        pieces = [pieces_of(size, units, part, True) for part in parts]
        if num_ranks > len(alone.ranges):
            assert all(each == alone for each in pieces)
        else:
            assert (*chain(*(each.ranges for each in pieces)),) == alone.ranges
            assert all(each.is_divided for each in pieces)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_query_heads_read_their_own_kv_head(group, num_kv_heads, data):
    begin = data.draw(st.integers(0, group * num_kv_heads - 1))
    heads = range(begin, data.draw(st.integers(begin + 1, group * num_kv_heads)))
    kept = [*chain(*key_heads(heads, group))]
    each = len(heads) // len(kept)
    assert each * len(kept) == len(heads)
    assert [kept[index // each] for index in range(len(heads))] == [head // group for head in heads]
    if heads.start % group == 0 and heads.stop % group == 0:
        assert kept == [*range(heads.start // group, heads.stop // group)]  # none repeated


def divided(config, rank, size, is_canonical=False):
    plan, _ = plan_step(random_model(config))
    return plan.ops, SumDivision(plan.ops, Part(rank, size), lambda matrix: 1, is_canonical)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_has_two_sums(name):
    """But those whose queries and keys are normed over all heads, which every rank has whole;
    shared experts have one more."""
    config = CONFIGS[name]
    _, division = divided(config, 0, 2)
    sums = [op for op in division.ops if isinstance(op, FusedSum)]
    has_shared = config.experts is not None and config.experts.shared_inner > 0
    num_shared = sum(config.experts.layers) if has_shared else 0
    num_attention = 0 if name == "olmo 2" else config.num_layers
    assert len(sums) == num_attention + config.num_layers + num_shared
    assert all(op.is_divided and len(op.terms) == 1 for op in sums)


def test_kv_heads_are_shared_out_or_repeated():
    heads = {}
    for size in (1, 2, 4):
        kept = []
        for rank in range(size):
            _, division = divided(LLAMA, rank, size)
            attention = next(op for op in division.ops if isinstance(op, FusedAttention))
            kept.append((attention.q.shape[0], attention.k.shape[0]))
        heads[size] = kept
        assert division.most_kv_heads == (None if size == 1 else kept[0][1]) or size == 1
    assert heads == {1: [(4, 2)], 2: [(2, 1)] * 2, 4: [(1, 1)] * 4}


def test_logits_are_shared_out():
    tokens = [divided(LLAMA, rank, 2)[1].ops[-1] for rank in range(2)]
    assert all(isinstance(head, FusedHead) and head.vocab_size == 61 for head in tokens)
    assert [head.weight.shape[0] for head in tokens] == [32, 29]


def test_canonical_sums_are_of_1_2_4_or_8_ranks():
    with pytest.raises(CannotFuse, match="3 ranks cannot share out evenly: choose 1, 2, 4 or 8"):
        divided(LLAMA, 0, 3, is_canonical=True)
