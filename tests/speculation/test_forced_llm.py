"""Answers under schemas with drafts of what these force, to the bit those without."""

from __future__ import annotations

import json

import pytest
from tiny_heads import TARGET, save_head

from octavo import LLM, SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.kernels.cpu import library
from octavo.speculation.step_times import StepTimeEstimator
from tests.conftest import write_tiny_model
from tests.speculation import test_eagle, test_medusa, test_redrafter

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

SCHEMA = {
    "type": "object",
    "properties": {"is_ready": {"type": "boolean"}, "number_of_items": {"enum": [1, 22, 333]}},
    "required": ["is_ready", "number_of_items"],
    "additionalProperties": False,
}
SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3, "logprobs": 2},
    "samples": {"temperature": 1.0, "seed": 4, "n": 3},
    "best samples": {"temperature": 1.0, "seed": 5, "n": 2, "best_of": 3},
}
DRAFTERS = {
    "no drafter": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft model": {"method": "draft_model"},
    "early exit": {"method": "early_exit", "exit_layer": 2},
    "medusa": {"method": "medusa"},
    "recurrent": {"method": "recurrent"},
    "eagle": {"method": "eagle"},
    "eagle, trees": {"method": "eagle", "num_speculative_tokens": 6},
}
HEADS = {"medusa": test_medusa, "recurrent": test_redrafter, "eagle": test_eagle}


@pytest.fixture(autouse=True)
def steps_of_known_times(monkeypatch):
    """How much is drafted does not depend on the machine."""
    monkeypatch.setattr(StepTimeEstimator, "observe", lambda *step: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("forced") / "tiny", **TARGET)


@pytest.fixture(scope="module", params=DRAFTERS)
def llm(request, model, tmp_path_factory):
    config = DRAFTERS[request.param]
    if config is not None and config["method"] not in ("ngram", "suffix"):
        config = {**config, "min_probability": 0.0}
    if config is not None and config["method"] == "draft_model":
        config["model"] = str(model)
    if config is not None and config["method"] in HEADS:
        head = HEADS[config["method"]]
        fields = {"octavo": {"acceptance": [0.3, 0.2]}, **head.CONFIG}
        folder = tmp_path_factory.mktemp("heads") / "head"
        config["model"] = str(save_head(folder, fields, head.tensors()))
    settings = {"num_blocks": 64, "max_model_len": 128, "threads": 1}
    with LLM(str(model), speculative_config=config, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(model):
    """The answers without any drafter."""
    with LLM(str(model), num_blocks=64, max_model_len=128, threads=1) as llm:
        return {
            name: answers(llm, speculative={"enabled": False}, **fields)
            for name, fields in SETTINGS.items()
        }


def answers(llm, **fields):
    params = SamplingParams(
        max_tokens=90,
        structured_outputs=StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        **fields,
    )
    (output,) = llm.generate("hello", params, use_tqdm=False)
    return [
        (sample.token_ids, sample.text, sample.logprobs, sample.finish_reason)
        for sample in output.outputs
    ]


def num_accepted(llm) -> int:
    return llm._text_engine.engine.scheduler.drafts.num_accepted


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_without_drafts(llm, plain, name):
    before = num_accepted(llm)
    assert answers(llm, speculative={"enabled": False}, **SETTINGS[name]) == plain[name]
    assert num_accepted(llm) == before
    assert answers(llm, **SETTINGS[name]) == plain[name]
    assert num_accepted(llm) > before + 15
    for _, text, _, finish_reason in plain[name]:
        assert finish_reason == "stop"
        assert list(json.loads(text)) == ["is_ready", "number_of_items"]


def test_requests_without_a_constraint_have_no_drafts_of_it(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_model_len=200, threads=1) as llm:
        llm.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
        assert llm._text_engine.engine.scheduler.drafts.num_tokens == 0
