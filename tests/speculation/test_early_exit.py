"""The first layers of a model draft what all of them would sample."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from loading import load_model
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.writer import build_engine_folder
from octavo.sources.open import open_source
from octavo.speculation.early_exit import ExitMeasurement, TrialForward, exit_candidates

BACKENDS = ["reference", "fused"]
if library.runnable():
    BACKENDS.append("native")
LIMITS = RankLimits(num_blocks=4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64)
TEXT = [5, 17, 40, 41, 9, 100, 3, 77, 12, 12, 50, 61, 8, 90, 33, 2, 7, 7, 120]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model_of_layers(request, tiny_model, tmp_path_factory) -> Path:
    if request.param == "llama":
        return tiny_model
    from tiny_transformers import make_model

    folder = tmp_path_factory.mktemp("exits") / request.param
    make_model(request.param).save_pretrained(folder)
    return folder


def first_layers(folder: Path, count: int, out: Path) -> Path:
    """A checkpoint of the first layers of another."""
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = count
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:count]
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    gone = [f"layers.{index}." for index in range(count, 100)]
    kept = {name: t for name, t in tensors.items() if not any(part in name for part in gone)}
    save_file(kept, out / "model.safetensors")
    return out


def started(path: Path, kernels: str) -> Rank:
    spec = RankSpec(path, kernels=kernels, threads=1)
    model, config = load_model(path)
    rank = Rank.of_model(spec, model, config)
    rank.start(LIMITS)
    return rank


@pytest.mark.parametrize("kernels", BACKENDS)
def test_an_exit_says_what_a_model_of_those_layers_says(model_of_layers, kernels, tmp_path):
    rank = started(model_of_layers, kernels)
    for count in range(1, rank.model_config.num_layers):
        cut = started(first_layers(model_of_layers, count, tmp_path / f"{count}"), kernels)
        exit = rank.forward.exit_after(count)
        said = TrialForward(exit, LIMITS.num_blocks).next_tokens(TEXT, 0)
        assert said == TrialForward(cut.forward, LIMITS.num_blocks).next_tokens(TEXT, 0)
        rows = range(len(TEXT))
        ours, theirs = (forward.logits(rows) for forward in (exit, cut.forward))
        assert (ours == theirs).all()
    assert len(set(said)) > 3


@pytest.mark.parametrize("kernels", BACKENDS)
def test_what_an_exit_writes_is_what_the_model_writes(model_of_layers, kernels):
    """A chain that the exit went through first leaves the model's answer as it is."""
    answers = []
    for exits in (False, True):
        rank = started(model_of_layers, kernels)
        whole = TrialForward(rank.forward, LIMITS.num_blocks)
        whole.next_tokens(TEXT[:10], 0)
        if exits:
            TrialForward(rank.forward.exit_after(1), LIMITS.num_blocks).next_tokens(TEXT, 9)
        answers.append(whole.next_tokens(TEXT, 9))
    assert answers[0] == answers[1]


@pytest.mark.skipif("native" not in BACKENDS, reason="no native library was built")
def test_an_engine_folder_has_the_same_exits(tiny_model, tmp_path):
    build_engine_folder(EngineArgs(str(tiny_model)), tmp_path / "engine")
    source = open_source(tmp_path / "engine")
    rank = source.load_rank(RankSpec(source.path, threads=1))
    rank.start(LIMITS)
    plain = started(tiny_model, "native")
    said = [
        TrialForward(each.forward.exit_after(1), LIMITS.num_blocks).next_tokens(TEXT, 0)
        for each in (rank, plain)
    ]
    assert said[0] == said[1]


def test_where_exits_are_tried():
    assert exit_candidates(30) == [3, 7, 11, 15, 18, 22, 26]
    assert exit_candidates(2) == [1]
    assert exit_candidates(3) == [1, 2]


def test_what_an_exit_is_worth():
    good = ExitMeasurement(8, agreement=0.8, cost=0.3, row_cost=0.1)
    assert good.num_tokens > 1 and good.speedup > 1
    assert good.speedup == pytest.approx(max(good.speedup_of(n) for n in range(1, 9)))
    assert good.speedup_of(1) == pytest.approx(1.8 / 1.4)
    assert ExitMeasurement(8, agreement=0.1, cost=0.3, row_cost=0.1).speedup < 1


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("exit_layer", [1, None])
def test_answers_stay_what_they_are(tiny_model, kernels, exit_layer, caplog):
    """With n samples of a prompt, whose blocks are copied, in a pool that is too small for all."""
    prompts = ["one prompt of some bytes", "another", "one prompt of some bytes"]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1, seed=4, max_tokens=25, repetition_penalty=1.3),
    ]
    settings = {"kernels": kernels, "num_blocks": 12, "max_model_len": 80, "threads": 1}
    answers = []
    for speculative in (None, {"method": "early_exit", "exit_layer": exit_layer}):
        with (
            caplog.at_level(logging.INFO, "octavo"),
            LLM(str(tiny_model), speculative_config=speculative, **settings) as llm,
        ):
            outputs = llm.generate(prompts, params)
            answers.append(
                [(s.token_ids, s.logprobs) for output in outputs for s in output.outputs]
            )
            drafts = llm._text_engine.engine.scheduler.drafts
    assert answers[0] == answers[1]
    assert drafts.num_drafts > 5
    assert ("early exit after layer 1 of 2" in caplog.text) == (exit_layer is None)


def test_a_layer_that_is_not_there_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="exit_layer 2 must be less than the 2 layers"):
        LLM(str(tiny_model), speculative_config={"method": "early_exit", "exit_layer": 2})


def test_what_cannot_be_measured_has_to_be_said(tiny_model):
    with pytest.raises(ConfigError, match="give exit_layer: steps and contexts of 4 tokens"):
        LLM(
            str(tiny_model),
            speculative_config={"method": "early_exit"},
            max_num_batched_tokens=4,
            threads=1,
        )
