"""From a tiny model to heads on disk."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from loading import load_model
from safetensors.torch import load_file
from tiny_training import WANTED, Talk, train

from octavo.base.errors import ConfigError
from octavo.draft_training import training_job
from octavo.draft_training.sequence_states import HiddenStates
from octavo.draft_training.training_job import TrainRequest
from octavo.layers.taps import with_taps
from octavo.layers.tensors import with_tensors
from octavo.quantize.layerwise_model import windows_context
from octavo.runtime.capacity import RankSpec


def head_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_hidden_states_are_those_of_the_model(tiny_model, kernels):
    model, config = load_model(tiny_model)
    sequences = [list(range(50, 70)), [7], list(range(100, 133))] * 30
    spec = RankSpec(tiny_model, kernels=kernels, threads=1)
    states = HiddenStates(spec, model, config, 40, (0, 1))
    got = list(states.of(sequences))
    states.close()
    assert len(got) == len(sequences)
    streams: dict[int, torch.Tensor] = {}
    tensors = with_taps(with_tensors(model), (0, 1), streams.__setitem__)
    for sequence, seen in list(zip(sequences, got, strict=True))[-6:]:
        exact = tensors(torch.tensor(sequence), windows_context(1, len(sequence)))
        np.testing.assert_allclose(seen.hidden, exact.numpy(), atol=0.1)
        side_by_side = torch.cat([streams[0], streams[1]], dim=1)
        np.testing.assert_allclose(seen.streams, side_by_side.numpy(), atol=0.3)  # of up to 40


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
        "computing hidden states",
        "training",
    }
    assert not list(tmp_path.glob("*.resume"))
    json.dumps(made.as_json(), allow_nan=False)


def test_medusa_is_written_as_others_read_it(tiny_model, tmp_path):
    train(tiny_model, tmp_path / "head", replace(WANTED, kind="medusa"))
    config, tensors = head_of(tmp_path / "head")
    assert config["architectures"] == ["MedusaModel"] and config["num_heads"] == 3
    assert config["truncated_vocab_size"] == 64
    assert set(tensors) == {
        "token_map",
        *(f"blocks.{h}.layers.0.{part}" for h in range(3) for part in ("weight", "bias")),
        *(f"lm_heads.{h}.weight" for h in range(3)),
    }
    assert all(0 <= rank < 10 for path in config["octavo"]["tree"] for rank in path)


def test_eagle_is_written_as_others_read_it(tiny_model, tmp_path):
    train(tiny_model, tmp_path / "head", replace(WANTED, kind="eagle"))
    config, tensors = head_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64 and config["num_hidden_layers"] == 1
    depths, inner = config["eagle_aux_hidden_state_layer_ids"], config["intermediate_size"]
    layer = {
        **{f"self_attn.{n}_proj": (rows, 96) for n, rows in (("q", 96), ("k", 32), ("v", 32))},
        "self_attn.o_proj": (48, 96),
        "mlp.down_proj": (48, inner),
        **{f"mlp.{n}_proj": (inner, 48) for n in ("gate", "up")},
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (48,)),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
        "fc.weight": (48, 48 * len(depths)),
        "norm.weight": (48,),
        "lm_head.weight": (64, 48),
        "d2t": (64,),
        "t2d": (260,),
    }
    listed = tensors["d2t"] + torch.arange(64)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == listed.tolist()
    head = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]  # it is tied
    assert torch.equal(tensors["lm_head.weight"], head[listed].bfloat16())
    assert tensors["midlayer.self_attn.o_proj.weight"].abs().max() > 0  # it has been trained


@pytest.mark.parametrize(
    ("kind", "when"),
    [*(("recurrent", w) for w in ("answering", "computing", "training")), ("eagle", "training")],
)
def test_a_run_that_was_ended_goes_on_to_the_same_head(
    tiny_model, tmp_path, monkeypatch, kind, when
):
    monkeypatch.setattr(training_job, "_KEEP_EVERY", 2)
    wanted = replace(WANTED, kind=kind)
    train(tiny_model, tmp_path / "whole", wanted)

    class Ended(Exception):
        pass

    def end(what, done, total):
        if what.startswith(when) and done >= (32 if when == "answering" else 1):
            raise Ended

    talk = Talk()
    with pytest.raises(Ended):
        train(tiny_model, tmp_path / "head", wanted, talk, end)
    assert not (tmp_path / "head").exists()
    train(tiny_model, tmp_path / "head", wanted, talk)
    whole, head = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "head")
    )
    assert whole == head
    assert talk.loaded == (2 if when == "answering" else 1)  # what is answered stays answered


def test_other_settings_do_not_go_on_from_it(tiny_model, tmp_path):
    def end(what, done, total):
        if what.startswith("computing"):
            raise KeyboardInterrupt

    talk = Talk()
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, tmp_path / "head", talk=talk, progress=end)
    train(tiny_model, tmp_path / "head", replace(WANTED, seed=4), talk)
    assert talk.loaded == 2


def test_nothing_is_overwritten(tiny_model, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine").touch()
    with pytest.raises(ConfigError, match="exists already"):
        train(tiny_model, tmp_path / "head")


def test_too_few_answers_are_refused(tiny_model, tmp_path):
    wanted = replace(WANTED, tokens=1)
    talk = Talk()
    talk._answer = lambda asks: [[] for _ in asks]
    with pytest.raises(ConfigError, match="too few"):
        train(tiny_model, tmp_path / "head", wanted, talk)


@pytest.mark.parametrize(
    "wrong", [{"kind": "tree"}, {"minutes": 0}, {"minutes": float("nan")}, {"tokens": 0},
              {"shortlist": 0}, {"steps": 0}, {"batch_size": 0}]
)  # fmt: skip
def test_what_is_wrong_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainRequest(**wrong)
