"""From a tiny model to heads on disk."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.layers.tensors import with_tensors
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from octavo.open_model import load_tokenizer
from octavo.quantization.produce.observers import windows_context
from octavo.runtime.capacity import RankSpec
from octavo.speculation.training import job
from octavo.speculation.training.hidden_states import HiddenStates
from octavo.speculation.training.job import Wanted, train_draft

WANTED = Wanted(
    tokens=1500, answer_tokens=40, shortlist=64, steps=5, batch_size=32, minutes=10, seed=3
)


class Talk:
    """Answers with random tokens, the same ones for the same seed, and counts how often it is
    loaded and asked."""

    def __init__(self) -> None:
        self.loaded = self.asked = 0

    @contextmanager
    def open(self):
        self.loaded += 1
        yield self._answer

    def _answer(self, asks):
        self.asked += len(asks)
        return [np.random.default_rng(ask.seed).integers(0, 90, 40).tolist() for ask in asks]


def train(tiny_model, out, wanted=WANTED, talk=None, progress=lambda *what: None):
    talk = talk or Talk()
    checkpoint, tokenizer = open_checkpoint(tiny_model), load_tokenizer(tiny_model)
    return train_draft(checkpoint, tokenizer, talk.open, out, wanted, progress)


def head_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_hidden_states_are_those_of_the_model(tiny_model, kernels):
    model, config = load_model(tiny_model)
    sequences = [list(range(50, 70)), [7], list(range(100, 133))] * 30
    states = HiddenStates(RankSpec(tiny_model, kernels=kernels, threads=1), model, config, 40)
    got = list(states.of(sequences))
    states.close()
    assert len(got) == len(sequences)
    tensors = with_tensors(model)
    for sequence, rows in list(zip(sequences, got, strict=True))[-6:]:
        exact = tensors(torch.tensor(sequence), windows_context(1, len(sequence)))
        np.testing.assert_allclose(rows, exact.numpy(), atol=0.1)


def test_a_recurrent_head_is_written_as_its_format_says(tiny_model, tmp_path):
    told = []
    made = train(tiny_model, tmp_path / "head", progress=lambda *what: told.append(what))
    config, tensors = head_of(tmp_path / "head")
    assert config["architectures"] == ["OctavoRecurrentDraft"]
    assert (config["hidden_size"], config["vocab_size"]) == (48, 260)
    inner, listed = config["intermediate_size"], config["draft_vocab_size"]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "embed_norm.weight": (48,),
        "layers.0.input_norm.weight": (48,),
        "layers.0.gate_proj.weight": (inner, 96),
        "layers.0.up_proj.weight": (inner, 96),
        "layers.0.down_proj.weight": (48, inner),
        "lm_head.weight": (listed, 48),
        "token_map": (listed,),
    }
    token_map = tensors["token_map"]
    assert listed == 64 and token_map.tolist() == sorted(set(token_map.tolist()))
    head = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]  # it is tied
    assert torch.equal(tensors["lm_head.weight"], head[token_map].bfloat16())
    assert tensors["layers.0.down_proj.weight"].abs().max() > 0  # it has been trained
    assert made.num_steps == 5 and made.num_tokens >= 1500
    assert len(made.acceptance) == 3 and config["octavo"]["acceptance"] is not None
    assert {what.split(",")[0] for what, _, _ in told} == {
        "answering",
        "looking at answers",
        "training",
    }
    assert not list(tmp_path.glob("*.resume"))
    json.dumps(made.as_json(), allow_nan=False)


def test_medusa_is_written_as_others_read_it(tiny_model, tmp_path):
    train(tiny_model, tmp_path / "head", Wanted(**{**_fields(WANTED), "kind": "medusa"}))
    config, tensors = head_of(tmp_path / "head")
    assert config["architectures"] == ["MedusaModel"] and config["num_heads"] == 3
    assert config["truncated_vocab_size"] == 64
    assert set(tensors) == {
        "token_map",
        *(f"blocks.{h}.layers.0.{part}" for h in range(3) for part in ("weight", "bias")),
        *(f"lm_heads.{h}.weight" for h in range(3)),
    }
    assert all(0 <= guess < 10 for path in config["octavo"]["tree"] for guess in path)


@pytest.mark.parametrize("when", ["answering", "looking", "training"])
def test_a_run_that_was_ended_goes_on_to_the_same_head(tiny_model, tmp_path, monkeypatch, when):
    monkeypatch.setattr(job, "_KEEP_EVERY", 2)
    train(tiny_model, tmp_path / "whole")

    class Ended(Exception):
        pass

    def end(what, done, total):
        if what.startswith(when) and done >= (32 if when == "answering" else 1):
            raise Ended

    talk = Talk()
    with pytest.raises(Ended):
        train(tiny_model, tmp_path / "head", talk=talk, progress=end)
    assert not (tmp_path / "head").exists()
    train(tiny_model, tmp_path / "head", talk=talk)
    whole, head = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "head")
    )
    assert whole == head
    assert talk.loaded == (2 if when == "answering" else 1)  # what is answered stays answered


def test_other_settings_do_not_go_on_from_it(tiny_model, tmp_path):
    def end(what, done, total):
        if what.startswith("looking"):
            raise KeyboardInterrupt

    talk = Talk()
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, tmp_path / "head", talk=talk, progress=end)
    train(tiny_model, tmp_path / "head", Wanted(**{**_fields(WANTED), "seed": 4}), talk)
    assert talk.loaded == 2


def test_nothing_is_overwritten(tiny_model, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine").touch()
    with pytest.raises(ConfigError, match="is there already"):
        train(tiny_model, tmp_path / "head")


def test_too_few_answers_are_refused(tiny_model, tmp_path):
    wanted = Wanted(**{**_fields(WANTED), "tokens": 1})
    talk = Talk()
    talk._answer = lambda asks: [[] for _ in asks]
    with pytest.raises(ConfigError, match="too few"):
        train(tiny_model, tmp_path / "head", wanted, talk)


@pytest.mark.parametrize(
    "wrong", [{"kind": "eagle"}, {"minutes": 0}, {"minutes": float("nan")}, {"tokens": 0},
              {"shortlist": 0}, {"steps": 0}, {"batch_size": 0}]
)  # fmt: skip
def test_what_is_wrong_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Wanted(**wrong)


def _fields(wanted: Wanted) -> dict:
    return {name: getattr(wanted, name) for name in Wanted.__slots__}
