"""What heads compute, what they lose, and that training makes them better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.draft_training.evaluation import acceptance, accuracies, expected_tokens, ranks
from octavo.draft_training.examples import (
    PositionBatch,
    PositionExamples,
    TargetWeights,
    TrainingSequences,
)
from octavo.draft_training.stateless_heads import TrainableMedusaHeads, TrainableReDrafterHead
from octavo.draft_training.training_loop import Schedule, Training
from octavo.draft_training.training_state import restore, snapshot

SIZE, VOCAB = 16, 40


def examples(steps: int = 3, seed: int = 0) -> PositionExamples:
    """Of a target that counts upwards, sometimes by two, and whose hidden state knows by how many;
    no other token than those below 32 can be drafted."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, SIZE, generator=generator)
    stride = 1 + (torch.arange(600) // 100) % 2
    token_ids = stride.cumsum(0) % VOCAB
    following = (token_ids + stride) % VOCAB
    hidden = embedding[following] + 0.5 * stride[:, None]
    shortlist = torch.arange(32)
    return PositionExamples(
        TargetWeights(embedding.bfloat16(), shortlist, embedding[shortlist], torch.ones(SIZE)),
        TrainingSequences(
            token_ids,
            hidden.bfloat16(),
            torch.empty(600, 0, dtype=torch.bfloat16),
            torch.arange(1, 601).div(100).ceil().long() * 100,
            torch.arange(600) % 100 >= 10,
        ),
        steps,
    )


def recurrent(num_layers: int = 1) -> TrainableReDrafterHead:
    return TrainableReDrafterHead(SIZE, 48, num_layers, 1e-5, seed=1)


HEADS = {
    "recurrent": recurrent,
    "two layers": lambda: recurrent(2),
    "medusa": lambda: TrainableMedusaHeads(SIZE, 3),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_heads_start_as_the_identity(make):
    hidden, embeddings = torch.randn(5, SIZE), torch.randn(5, 3, SIZE)
    states = list(make().states(PositionBatch(hidden, embeddings)))
    assert len(states) == 3
    assert all(torch.equal(state, hidden) for state in states)


def test_a_recurrent_head_computes_what_its_format_says():
    head = recurrent(num_layers=2)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor.detach().double().numpy() for name, tensor in head.state_dict().items()}
    hidden, embeddings = torch.randn(4, SIZE), torch.randn(4, 3, SIZE)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    state = hidden.double().numpy()
    for ahead, got in enumerate(head.states(PositionBatch(hidden, embeddings))):
        embedding = norm(embeddings[:, ahead].double().numpy(), "embed_norm.weight")
        for layer in range(2):
            x = norm(state, f"layers.{layer}.input_norm.weight")
            x = np.concatenate([x, embedding], -1) if layer == 0 else x
            gate, up, down = (
                tensors[f"layers.{layer}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            gated = x @ gate.T
            state = state + (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
        np.testing.assert_allclose(got.detach().numpy(), state, rtol=1e-4, atol=1e-4)


def test_positions_are_those_whose_next_tokens_are_of_the_answer():
    some = examples()
    starts = some.units.tolist()
    assert min(starts) == 8  # its first draft token is token 10, where the answer begins
    assert max(starts) == 595  # its third is the last token
    assert not {96, 97, 98, 99, 100, 107} & set(starts)
    batch = some.batch(torch.tensor([8]))
    tokens = (torch.arange(10, 13) + 1).tolist()
    assert batch.wanted.tolist() == [tokens]
    assert batch.likely[0, :, 0].tolist() == tokens
    torch.testing.assert_close(batch.shares.sum(-1), torch.ones(1, 3))


def test_tokens_outside_of_the_shortlist_are_never_right():
    some = examples()
    start = some.units[some.batch(some.units).wanted[:, 0] == -1][:1]
    assert ranks(recurrent(), some, start)[0, 0] == 32
    all_equal = torch.zeros(32, SIZE)
    flat = PositionExamples(replace(some.target, rows=all_equal), some._sequences, 3)
    assert acceptance(ranks(recurrent(), flat, flat.units)) == [0, 0, 0]  # nor are ties


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_training_makes_a_head_better(make):
    some, head = examples(), make()
    before = acceptance(ranks(head, some, some.units))
    losses = []
    training = Training(head, some, Schedule(150, batch_size=64, rate=2e-2))
    training.run(150, lambda report: losses.append(report.loss))
    after = acceptance(ranks(head, some, some.units))
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert after[0] > before[0] + 0.1


def test_a_training_that_was_interrupted_ends_with_the_same_bytes():
    schedule = Schedule(12, batch_size=200)  # more than a round, whose order changes
    whole, first, second = (Training(recurrent(), examples(), schedule) for _ in range(3))
    whole.run(12)
    first.run(7)
    restore(second, {name: array.copy() for name, array in snapshot(first).items()})
    assert second.step == 7
    second.run(12)
    for one, other in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rates_rise_and_fall():
    schedule = Schedule(100, rate=1.0)
    rates = [schedule.rate_at(step) for step in range(100)]
    assert rates[0] < rates[1] and rates[2:] == sorted(rates[2:], reverse=True)
    assert max(rates) > 0.99 and 0 < rates[-1] < 0.01


def test_acceptance_is_given_those_before():
    places = torch.tensor([[0, 0, 1], [0, 2, 0], [1, 0, 0], [0, 0, 0]])
    assert acceptance(places) == [3 / 4, 2 / 3, 1 / 2]
    assert expected_tokens([0.75, 2 / 3, 0.5]) == pytest.approx(1 + 0.75 + 0.5 + 0.25)
    assert expected_tokens([0.75, 2 / 3, 0.5], 1) == 1.75
    assert accuracies(places, 2) == [[0.75, 0.25], [0.75, 0.0], [0.75, 0.25]]
