"""The EAGLE head in training: it computes what it will in use, learns, and is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import (
    TARGET,
    decoder_layer,
    embedding_of,
    engine_of,
    is_likely,
    requests,
    rms,
    run,
    true_states,
)
from tiny_training import WANTED, train

from octavo.base.fields import Fields
from octavo.draft_training.context_examples import ContextBatch, ContextExamples
from octavo.draft_training.eagle import TrainableEagleHead, eagle_depths
from octavo.draft_training.evaluation import acceptance, ranks
from octavo.draft_training.examples import TargetWeights, TrainingSequences
from octavo.draft_training.training_loop import Schedule, Training
from octavo.draft_training.training_state import restore, snapshot
from octavo.kernels.cpu import library
from octavo.speculation.eagle import layer_config
from tests.conftest import write_tiny_model

SIZE, VOCAB, HEADS, DIM, EPS = 32, 40, 4, 8, 1e-5
LAYER = {
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
}


def head_of(config: dict, num_depths: int, norm: torch.Tensor) -> TrainableEagleHead:
    return TrainableEagleHead(
        layer_config(Fields(Path("config.json"), config)), num_depths, norm, seed=1
    )


def eagle() -> TrainableEagleHead:
    return head_of(LAYER, 2, torch.linspace(0.5, 2, SIZE))


def pieces() -> ContextExamples:
    """Of a target that counts upwards, each answer by a stride of its own, which its streams do
    not say: it takes two of the tokens to know."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, SIZE, generator=generator)
    counts = torch.full((12,), 50)
    stride = torch.tensor([1, 2, 5]).repeat(4).repeat_interleave(counts)
    token_ids = stride.cumsum(0) % VOCAB
    following = embedding[(token_ids + stride) % VOCAB]
    shortlist = torch.arange(36)
    return ContextExamples(
        TargetWeights(embedding.bfloat16(), shortlist, embedding[shortlist], torch.ones(SIZE)),
        TrainingSequences(
            token_ids,
            following.bfloat16(),
            torch.cat([embedding[token_ids], following], dim=1).bfloat16(),
            counts.cumsum(0).repeat_interleave(counts),
            torch.arange(600) % 50 >= 10,
        ),
        3,
    )


def test_it_starts_with_what_the_target_said_before():
    head, batch = eagle(), pieces().batch(torch.arange(3))
    deepest = batch.inputs.streams[batch.inputs.starts(), SIZE:].numpy()
    said = rms(deepest, np.linspace(0.5, 2, SIZE, dtype=np.float32), EPS)
    for state in head.states(batch.inputs):
        cosines = torch.cosine_similarity(state, torch.from_numpy(said))
        torch.testing.assert_close(cosines, torch.ones(len(said)), atol=1e-4, rtol=0)


def test_unrolled_it_computes_what_it_does_step_by_step():
    """All positions at once are each position alone: its own outputs in place of features, after
    those of the target."""
    head, batch = eagle(), pieces().batch(torch.tensor([4, 0]))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made = {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}
    inputs = batch.inputs
    unrolled = torch.stack([*head.states(inputs)]).detach().numpy()
    features = inputs.streams.double().numpy() @ made["fc.weight"].T
    ends = np.cumsum(inputs.lengths).repeat(inputs.counts)
    begins = ends - np.repeat(inputs.lengths, inputs.counts)
    for row, start in [*enumerate(inputs.starts().tolist())][::7]:
        seen = slice(begins[row], start + 1)
        known, embeddings = features[seen], inputs.following.double().numpy()[seen]
        for ahead in range(3):
            e = rms(embeddings, made["midlayer.input_layernorm.weight"], EPS)
            f = rms(known, made["midlayer.hidden_norm.weight"], EPS)
            x = decoder_layer(np.concatenate([e, f], axis=1), f, made, "midlayer.", HEADS, DIM)
            state = rms(x[-1], made["norm.weight"], EPS)
            np.testing.assert_allclose(unrolled[ahead, row], state, rtol=1e-3, atol=1e-3)
            following = inputs.embeddings[row, ahead + 1 : ahead + 2].double().numpy()
            known = np.concatenate([known, x[-1:]])
            embeddings = np.concatenate([embeddings, following])


def test_training_makes_it_better():
    some, head, losses = pieces(), eagle(), []
    before = acceptance(ranks(head, some, some.units))
    training = Training(head, some, Schedule(40, batch_size=128, rate=5e-3))
    training.run(40, lambda report: losses.append(report.loss))
    after = acceptance(ranks(head, some, some.units))
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert after[0] > before[0] + 0.3


def test_a_training_that_was_interrupted_ends_with_the_same_bytes():
    schedule = Schedule(12, batch_size=128)  # more than a round, whose order changes
    whole, first, second = (Training(eagle(), pieces(), schedule) for _ in range(3))
    whole.run(12)
    first.run(7)
    restore(second, {name: array.copy() for name, array in snapshot(first).items()})
    second.run(12)
    for one, other in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6, 7, 30])
def test_depths_are_there_and_differ(num_layers):
    depths = eagle_depths(num_layers)
    assert depths == tuple(sorted(set(depths))) and max(depths) <= num_layers
    assert num_layers < 7 or depths == (2, num_layers // 2, num_layers - 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("eagle") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("eagle") / "head"
    train(model, out, replace(WANTED, kind="eagle", steps=30))
    return out


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_it_drafts_in_use_what_it_does_in_training(model, trained):
    config, tensors = (
        json.loads((trained / "config.json").read_text()),
        load_file(trained / "model.safetensors"),
    )
    rows, listed = tensors.pop("lm_head.weight").float(), tensors.pop("d2t") + torch.arange(64)
    tensors.pop("t2d")
    depths, embedding = config["eagle_aux_hidden_state_layer_ids"], embedding_of(model)
    head = head_of(config, len(depths), torch.ones(len(tensors["norm.weight"])))
    head.load_state_dict(tensors)
    settings = {"kv_cache_dtype": "f32", "enable_prefix_caching": False}
    drafts = run(engine_of(model, trained, "eagle", **settings), requests(4)).drafts
    assert {len(draft) for _, draft in drafts} >= {2, 3}
    for known, draft in drafts[::11]:
        count = len(known) - 1
        following = torch.from_numpy(embedding[[*known[1:], *draft.token_ids]])
        streams = np.concatenate(true_states(model, known[:-1], depths), axis=1)
        context = ContextBatch(
            torch.from_numpy(streams),
            following[:count],
            torch.arange(count),
            following[None, count - 1 : -1],
            [count],
            [1],
        )
        for token_id, state in zip(draft.token_ids, head.states(context), strict=True):
            logits = (state.detach() @ rows.T)[0].numpy()
            assert is_likely(logits, listed.tolist().index(token_id))


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_answers_are_those_without(model, trained):
    drafted = run(engine_of(model, trained, "eagle"), requests())
    assert drafted.token_ids == run(engine_of(model), requests()).token_ids
    assert len(drafted.drafts) > 20
