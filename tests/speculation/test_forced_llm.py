"""Answers under schemas with drafts of what these force, to the bit those without."""

from __future__ import annotations

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.speculation.step_times import StepTimeEstimator

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
}


@pytest.fixture(autouse=True)
def steps_of_known_times(monkeypatch):
    """How much is drafted does not depend on the machine."""
    monkeypatch.setattr(StepTimeEstimator, "observe", lambda *step: None)


@pytest.fixture(scope="module", params=[None, {"method": "ngram"}], ids=["no drafter", "ngram"])
def llm(request, tiny_model):
    settings = {"num_blocks": 64, "max_model_len": 200, "threads": 1}
    with LLM(str(tiny_model), speculative_config=request.param, **settings) as llm:
        yield llm


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
def test_answers_are_those_without_drafts(llm, name):
    before = num_accepted(llm)
    plain = answers(llm, speculative={"enabled": False}, **SETTINGS[name])
    assert num_accepted(llm) == before
    assert answers(llm, **SETTINGS[name]) == plain
    assert num_accepted(llm) > before + 15
    for _, text, _, finish_reason in plain:
        assert finish_reason == "stop"
        assert list(json.loads(text)) == ["is_ready", "number_of_items"]


def test_requests_without_a_constraint_have_no_drafts_of_it(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_model_len=200, threads=1) as llm:
        llm.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
        assert llm._text_engine.engine.scheduler.drafts.num_tokens == 0
