"""Pieces of answers: every position once, and each with all that is before it."""

from __future__ import annotations

import pytest
import torch

from octavo.draft_training import context_examples
from octavo.draft_training.context_examples import ContextExamples
from octavo.draft_training.examples import PositionExamples, TargetWeights, TrainingSequences

SIZE, VOCAB, STEPS = 8, 30, 3
LENGTHS, PROMPTS = (40, 3, 25, 60), (10, 2, 1, 5)


@pytest.fixture
def target():
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, SIZE, generator=generator)
    listed = torch.arange(0, VOCAB, 2)
    return TargetWeights(embedding.bfloat16(), listed, embedding[listed], torch.ones(SIZE))


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(1)
    counts, total = torch.tensor(LENGTHS), sum(LENGTHS)
    return TrainingSequences(
        torch.randint(VOCAB, (total,), generator=generator),
        torch.randn(total, SIZE, generator=generator).bfloat16(),
        torch.randn(total, 2 * SIZE, generator=generator).bfloat16(),
        counts.cumsum(0).repeat_interleave(counts),
        torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)]),
    )


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few positions, which see not many before them."""
    monkeypatch.setattr(context_examples, "_PIECE", 8)
    monkeypatch.setattr(context_examples, "_CONTEXT", 20)


def test_what_is_wanted_is_what_single_positions_have(target, sequences, small):
    single, whole = (
        PositionExamples(target, sequences, STEPS),
        ContextExamples(target, sequences, STEPS),
    )
    order = torch.randperm(len(whole.units), generator=torch.Generator().manual_seed(2))
    batch = whole.batch(order)
    starts, context = whole._read(order)
    assert sorted(starts.tolist()) == single.units.tolist()  # every position once
    same = single.batch(starts)
    for name in ("wanted", "likely", "shares"):
        assert torch.equal(getattr(batch, name), getattr(same, name))
    assert torch.equal(context.embeddings, same.inputs.embeddings)
    assert torch.equal(context.following[context.starts()], same.inputs.embeddings[:, 0])


def test_pieces_have_the_context_before_them(target, sequences, small):
    whole = ContextExamples(target, sequences, STEPS)
    starts, context = whole._read(whole.units)
    begins = torch.tensor([0, *LENGTHS]).cumsum(0)
    streams, tokens = sequences.streams.float(), sequences.token_ids
    row = 0
    for length, predicted in zip(context.lengths, starts.split(context.counts), strict=True):
        seen = torch.arange(row, row + length)
        there = torch.arange(int(predicted[-1]) + 1 - length, int(predicted[-1]) + 1)
        assert torch.equal(there[-len(predicted) :], predicted)
        begin = begins[begins <= predicted[0]].max()
        assert there[0] == max(begin, predicted[0] - 20)
        assert torch.equal(context.positions[seen], there - begin)
        assert torch.equal(context.streams[seen], streams[there])
        assert torch.equal(context.following[seen], target.embed(tokens[there + 1]))
        row += length
    assert row == len(context.streams)


def test_pieces_of_an_answer_are_of_nearly_the_same_length(target, sequences, small):
    whole = ContextExamples(target, sequences, STEPS)
    lengths = [len(whole._read(unit[None])[0]) for unit in whole.units]
    assert max(lengths) <= 8 and min(lengths) >= 4
