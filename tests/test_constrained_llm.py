"""Constrained answers: valid, and bit for bit the same in any company and under any settings that
change no other answer."""

from __future__ import annotations

import json
import re

import pytest

from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.base.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPT = "a prompt of some bytes, which others share"


def params(max_tokens=160, **fields):
    names = ("json", "regex", "choice", "grammar", "structural_tag", "begins_after")
    asked = {name: fields.pop(name) for name in names if name in fields}
    fields = {"temperature": 1.0, "seed": 3, **fields}
    return SamplingParams(
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputs(**asked) if asked else None,
        **fields,
    )


def every_kind() -> list[SamplingParams]:
    tags = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
            "triggers": ["<n>"]}  # fmt: skip
    return [
        params(json=SCHEMA, temperature=0.0),
        params(json=SCHEMA, logprobs=2, seed=5),
        params(json=SCHEMA, n=3, seed=6),
        params(json=SCHEMA, presence_penalty=0.5, min_tokens=150),
        params(regex="[a-c]{2,30}-[0-9]{4}", ignore_eos=True),
        params(choice=["yes", "no", "no way"], temperature=0.0, logprobs=0),
        params(grammar='root ::= "(" root ")" root | "x"', bad_words=["xx"], max_tokens=30),
        params(structural_tag=tags, max_tokens=30),
        params(json=SCHEMA, begins_after="e", max_tokens=60),
        params(),
        params(temperature=0.0, ignore_eos=True, max_tokens=40),
    ]


def facts(output):
    return [
        (each.token_ids, each.text, each.finish_reason, each.cumulative_logprob, each.logprobs)
        for each in output.outputs
    ]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), max_model_len=250, num_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    """The answers of requests that ran alone."""
    return [facts(llm.generate(PROMPT, each)[0]) for each in every_kind()]


def test_finished_answers_are_valid(llm, alone):
    jsonschema = pytest.importorskip("jsonschema")
    finished = 0
    for answers in alone[:4]:
        for _, text, reason, *_ in answers:
            if reason == "stop":
                jsonschema.validate(json.loads(text), SCHEMA)
                finished += 1
    assert finished >= 4
    (((_, text, reason, *_),), ((_, choice, end, *_),)) = alone[4:6]
    assert reason == "length" or re.fullmatch("[a-c]{2,30}-[0-9]{4}", text)
    assert choice in ("yes", "no", "no way") and end == "stop"


MANY = [
    {},
    {"num_blocks": 18, "max_num_seqs": 8},  # preemption
    {"max_num_seqs": 2},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 16},
    {"spec_method": "ngram", "spec_tokens": 4},
    {"async_scheduling": False},
]


@pytest.mark.parametrize("settings", MANY, ids=lambda each: "-".join(map(str, each)) or "together")
def test_answers_are_those_of_requests_that_ran_alone(tiny_model, llm, alone, settings):
    kinds = every_kind()
    if not settings:
        outputs = llm.generate([PROMPT] * len(kinds), kinds)
        outputs = llm.generate([PROMPT] * len(kinds), kinds)  # the prefix is cached
    else:
        with LLM(str(tiny_model), max_model_len=250, **{"num_blocks": 200, **settings}) as other:
            outputs = other.generate([PROMPT] * len(kinds), kinds)
            if "num_blocks" in settings:
                assert sum(output.metrics.num_preemptions for output in outputs) > 0
            if "spec_method" in settings:
                assert sum(output.metrics.drafts.num_tokens for output in outputs) > 0
    assert [facts(output) for output in outputs] == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"window": 64, "attention_sinks": 4},
        {"spec_method": "suffix", "kv_cache_dtype": "int8"},
    ],
    ids=lambda each: "-".join(map(str, each)),
)
def test_company_changes_nothing_under_other_settings_too(tiny_model, settings):
    kinds = every_kind()
    with LLM(str(tiny_model), max_model_len=250, num_blocks=200, **settings) as llm:
        one_by_one = [facts(llm.generate(PROMPT, each)[0]) for each in kinds]
        together = [facts(output) for output in llm.generate([PROMPT] * len(kinds), kinds)]
    assert together == one_by_one


def answer(llm, sampling):
    return llm.generate(PROMPT, sampling)[0].outputs[0]


def test_a_finished_grammar_ends_an_answer_that_should_be_longer(llm):
    for more in ({"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}):
        found = answer(llm, params(choice=["ab", "abcd"], **more))
        assert (found.text, found.finish_reason) == ("abcd", "stop")
    assert answer(llm, params(regex="a{1,40}", min_tokens=12)).text >= "a" * 12


def test_an_answer_that_is_cut_is_the_beginning_of_a_valid_one(llm):
    whole = answer(llm, params(json=SCHEMA))
    assert whole.finish_reason == "stop"
    cut = answer(llm, params(json=SCHEMA, max_tokens=10))
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text) and len(cut.token_ids) == 10


def test_stop_strings_and_stop_tokens_may_cut_an_answer(llm):
    found = answer(llm, params(regex="[ab]{30}c", stop=["c"]))
    assert found.finish_reason == "stop" and found.stop_reason == "c"
    token = answer(llm, params(regex="ab")).token_ids[1]
    found = answer(llm, params(regex="ab*c", stop_token_ids=[token], temperature=0.0))
    assert found.text in ("a", "ac")


@pytest.mark.parametrize("more", [{"bad_words": ["b"]}, {"allowed_token_ids": [70]}])
def test_what_leaves_no_token_ends_this_request_alone(llm, more):
    sampling = [params(regex="abc", **more), params(regex="abc")]
    broken, fine = llm.generate([PROMPT] * 2, sampling)
    assert fine.outputs[0].text == "abc"
    assert broken.outputs[0].finish_reason == "error"
    assert "leave no token" in broken.error


def test_a_grammar_that_would_end_python_is_refused(llm):
    """Its rules would overflow the stack where it is compiled."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(9000))
    hostile = params(grammar=f'start: r0\n{rules}\nr9000: "x"')
    with pytest.raises(InvalidRequestError, match="too complex"):
        llm.generate(PROMPT, hostile)
    large = params(choice=["x" * 20_000], max_tokens=5)  # tried as well, and served
    assert answer(llm, large).text == "xxxxx"
