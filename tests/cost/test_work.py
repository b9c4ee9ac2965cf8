"""The work of a step, by hand; that of live engines is in tests/bench and tests/performance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import AttentionOp, Experts, MatrixOp, RankModel
from octavo.cost.work import (
    NOTHING,
    ResourceUse,
    RowCounts,
    Span,
    StepWork,
    busiest,
    decode_attention_work,
    experts_hit,
    matrix_work,
    passes,
    prompt_attention_work,
    ranks_hit,
    step_work,
)

ATTENTION = AttentionOp("attention", 2, flops_per_score=4 * 4, kv_bytes_per_token=5)


def rank_model(*attention: AttentionOp, **more) -> RankModel:
    """1,000 weights in layers, 500 in the head."""
    matrices = (
        MatrixOp("linear", 2, 10, 50, num_params=500, num_bytes=750),
        MatrixOp("head", 1, 10, 50, num_params=500, num_bytes=500, sampled_only=True),
    )
    shape = {"hidden_size": 10, "vocab_size": 50, "num_layers": 2, "activation_bytes": 0}
    return RankModel(matrices, attention or (ATTENTION,), **{**shape, **more})


MODEL = rank_model()


def batch(*spans: tuple[int, int, int]) -> Batch:
    """Items of (start, tokens, known tokens)."""
    return Batch(
        0,
        tuple(
            ScheduledRequest(
                Request("r", [0] * known, SamplingParams(), 0.0),
                start,
                count,
                num_sampled=int(start + count == known),
            )
            for start, count, known in spans
        ),
    )


def work(
    *spans: tuple[int, int, int], num_multi_steps: int = 1, model: RankModel = MODEL
) -> StepWork:
    return step_work(model, batch(*spans).items, num_multi_steps)


def test_a_decoded_token_reads_all_weights_and_its_keys():
    done = work((19, 1, 20))
    assert done.linear == ResourceUse(1500, 2 * 1000)
    assert done.head == ResourceUse(500, 2 * 500)
    # 20 keys are read and one is written; a query and a value product of width 8 for each of 20
    assert done.attention == ResourceUse(21 * 10, 4 * 8 * 20)
    assert done.total == ResourceUse(1500 + 500 + 210, 2000 + 1000 + 640)


def test_a_batch_reads_the_weights_once():
    one, two = work((19, 1, 20)), work((19, 1, 20), (29, 1, 30))
    assert two.linear == ResourceUse(1500, 2 * one.linear.flops)
    assert two.head == ResourceUse(500, 2 * one.head.flops)
    assert two.attention == ResourceUse((21 + 31) * 10, 4 * 8 * (20 + 30))


def test_the_head_is_read_only_where_a_token_is_sampled():
    assert work((0, 4, 9)).head == ResourceUse()
    assert work((0, 4, 4)).head == ResourceUse(500, 2 * 500)
    assert work((0, 4, 9), (3, 1, 4)).head == ResourceUse(500, 2 * 500)


def test_attention_is_causal():
    assert work((0, 4, 4)).attention == ResourceUse((4 + 4) * 10, 4 * 8 * (1 + 2 + 3 + 4))
    assert work((2, 2, 4)).attention == ResourceUse((4 + 2) * 10, 4 * 8 * (3 + 4))


@pytest.mark.parametrize("window", [1, 3, 4, 7, 100])
def test_a_window_hides_what_is_far_behind(window):
    """Against counting one by one."""
    model = rank_model(AttentionOp("attention", 1, 4.0, 1.0, window=window))
    for start, count in itertools.product(range(12), range(1, 9)):
        seen = [
            range(max(0, query - window + 1), query + 1) for query in range(start, start + count)
        ]
        pairs = sum(map(len, seen))
        keys = len(set().union(*seen))
        done = work((start, count, start + count), model=model).attention
        assert done == ResourceUse(keys + count, 4 * pairs)


def test_multi_steps_are_the_steps_that_they_stand_for():
    apart = work((19, 1, 20)) + work((20, 1, 21)) + work((21, 1, 22))
    assert work((19, 1, 20), num_multi_steps=3) == apart
    assert apart.linear.bytes == 3 * 1500


def test_chunks_of_a_prompt_read_weights_again_and_score_the_same():
    whole, parts = work((0, 10, 10)), work((0, 6, 10)) + work((6, 4, 10))
    assert parts.total.flops == whole.total.flops
    assert parts.linear.bytes == 2 * whole.linear.bytes
    assert parts.attention.bytes == whole.attention.bytes + 6 * 10  # read again


def test_more_work_is_never_less():
    steps = [(0, 1), (0, 5), (5, 5), (50, 1), (50, 30)]
    for (start, count), (later, more) in itertools.product(steps, steps):
        if later < start or more < count:
            continue
        less = work((start, count, start + count)).total
        greater = work((later, more, later + more)).total
        assert greater.bytes >= less.bytes and greater.flops >= less.flops


def test_a_window_hides_the_same_of_single_tokens():
    op = AttentionOp("attention", 1, 4.0, 1.0, window=5)
    for start in range(12):
        (one,) = passes([Span(start, 1)])
        as_prompt = RowCounts(1, 1, [], prompts=[(start, 1)])
        assert decode_attention_work(op, one) == prompt_attention_work(op, as_prompt)


def test_a_token_alone_is_cheaper_by_its_own_figure():
    """Latent attention is absorbed in decoding, and expanded in prompts."""
    op = AttentionOp("latent", 3, 10.0, 2.0, decode_flops_per_score=7.0)
    (rows,) = passes([Span(9, 1), Span(4, 3, 3, range(2)), Span(0, 6)])
    assert (rows.singles, rows.drafts, rows.prompts) == ([9], [(4, 3)], [(0, 6)])
    decoding = decode_attention_work(op, rows)
    assert decoding.flops == 3 * 7 * (10 + 5 + 6 + 7)
    assert decoding.bytes == 3 * 2 * (11 + 10)
    assert prompt_attention_work(op, rows).flops == 3 * 10 * 21


def test_a_state_is_read_and_written_for_each_sequence_however_long():
    op = AttentionOp("state", 4, 0.0, 0.0, state_bytes=100.0)
    (rows,) = passes([Span(9_999, 1), Span(0, 50), Span(7, 3, 3, range(2))])
    assert decode_attention_work(op, rows) == ResourceUse(2 * 4 * 2 * 100)
    assert prompt_attention_work(op, rows) == ResourceUse(1 * 4 * 2 * 100)


def test_every_row_of_a_draft_is_sampled():
    """Three rows for each of two sequences of 20 tokens: the head is read once, and used six
    times."""
    done = step_work(MODEL, [Span.verifying(20, 2)] * 2)
    assert done.linear == ResourceUse(1500, 2 * 1000 * 6)
    assert done.head == ResourceUse(500, 2 * 500 * 6)
    assert done.attention == ResourceUse(2 * (3 + 23) * 10, 4 * 8 * 2 * (21 + 22 + 23))
    request = Request("r", [0] * 21, SamplingParams(), 0.0)
    item = ScheduledRequest(request, 20, 3, 3, Draft.chain([1, 2]))
    assert step_work(MODEL, [item, item]) == done


def test_drafts_that_end_a_prompt_are_sampled_without_it():
    (rows,) = passes([Span(0, 10, 3, range(2))])
    assert (rows.num_tokens, rows.num_sampled, rows.prompts) == (10, 3, [(0, 10)])


def test_multi_steps_go_on_with_those_that_sample():
    first, second, third = passes([Span(5, 1), Span(0, 4, 0), Span(0, 3)], num_multi_steps=3)
    assert (first.num_tokens, first.num_sampled, first.num_seqs) == (8, 2, 3)
    assert (second.singles, second.num_tokens, second.num_sampled) == ([6, 3], 2, 2)
    assert third.singles == [7, 4]


def test_activations_count_where_they_have_bytes():
    (rows,) = passes([Span(0, 4)])
    model = rank_model(activation_bytes=2)
    linear, head = model.matrices
    assert matrix_work(linear, rows, model).bytes == 1500 + 2 * 4 * 60 * 2
    assert matrix_work(head, rows, model).bytes == 500 + 60 * 2


# -- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "per_token", "hits"),
    [
        (128, 4, {1: 4.0, 4: 15.27, 16: 50.98, 64: 111.2}),
        (8, 2, {1: 2.0, 4: 5.47, 16: 7.92}),
        (256, 8, {1: 8.0, 4: 30.5, 16: 102.0, 64: 222.4}),
    ],
)
def test_experts_that_a_batch_hits(total, per_token, hits):
    """Reference case R32: a closed form, which counting by chance agrees with."""
    for num_tokens, expected in hits.items():
        assert experts_hit(total, per_token, num_tokens) == pytest.approx(expected, rel=2e-3)
    assert experts_hit(total, per_token, 10_000) == pytest.approx(total)


def expert_op(on_rank: int) -> MatrixOp:
    """128 experts of 10 x 6 in each of three layers, of which a token uses 4."""
    experts = Experts(total=128, per_token=4, on_rank=on_rank)
    return MatrixOp("experts", 3, 10, 6, 60 * on_rank, 120.0 * on_rank, experts=experts)


def test_experts_are_read_as_far_as_they_are_hit():
    (rows,) = passes([Span(9, 1)] * 16)
    done = matrix_work(expert_op(128), rows, MODEL)
    assert done.bytes == pytest.approx(3 * 120 * 50.98, rel=1e-3)
    assert done.flops == pytest.approx(3 * 2 * 60 * 16 * 4)


def test_experts_apart_wait_for_the_busiest():
    """Of 8 ranks, each with its own 16 tokens and an eighth of the experts."""
    (rows,) = passes([Span(9, 1)] * 16)
    apart = rank_model(parallel=Parallel(ep=8, dp=8))
    done = matrix_work(expert_op(16), rows, apart)
    most = busiest(128 * 4 / 8, 8, 128 * 4)
    assert done.flops == pytest.approx(3 * 2 * 60 * most)
    hit = experts_hit(128, 4, 128)
    read = busiest(hit / 8, 8, 16, 1 - hit / 128)
    assert hit / 8 < read <= 16
    assert done.bytes == pytest.approx(3 * 120 * read)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 512])
@pytest.mark.parametrize(("total", "per_token"), [(8, 2), (64, 6), (128, 8)])
def test_the_busiest_rank_is_as_by_chance(total, per_token, num_tokens, num_ranks):
    """Figures of a hundred steps whose tokens choose experts by chance."""
    rng = np.random.default_rng(0)
    owner = np.arange(total) * num_ranks // total
    uses, reads = [], []
    for _ in range(100):
        chosen = rng.random((num_tokens, total)).argsort(axis=1)[:, :per_token]
        uses.append(np.bincount(owner[chosen].ravel()).max())
        reads.append(np.bincount(owner[np.unique(chosen)]).max())
    count, hit = num_tokens * per_token, experts_hit(total, per_token, num_tokens)
    assert busiest(count / num_ranks, num_ranks, count) == pytest.approx(np.mean(uses), rel=0.17)
    found = busiest(hit / num_ranks, num_ranks, min(hit, total / num_ranks), 1 - hit / total)
    assert found == pytest.approx(np.mean(reads), rel=0.12)


def test_one_rank_has_it_all():
    assert busiest(7.0, 1, 7.0) == 7.0


@pytest.mark.parametrize(("total", "per_token", "num_ranks"), [(8, 2, 8), (12, 3, 4), (6, 6, 3)])
def test_ranks_that_have_one_of_a_tokens_experts(total, per_token, num_ranks):
    """Counted for each choice of experts that there is."""
    on_rank = total // num_ranks
    hit = [
        len({expert // on_rank for expert in chosen})
        for chosen in itertools.combinations(range(total), per_token)
    ]
    found = ranks_hit(Experts(total, per_token, on_rank), num_ranks)
    assert found == pytest.approx(sum(hit) / len(hit))


def test_nothing_is_nothing():
    (rows,) = passes([Span(0, 4, 0)])
    assert matrix_work(MODEL.matrices[1], rows, MODEL) is NOTHING
    assert step_work(MODEL, []) == StepWork()
