from __future__ import annotations

import pytest
from format_cases import CASES, CLOCK

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.serving.answer_reader import AnswerReader, AskedTools


@pytest.mark.parametrize(
    ("name", "after"), [("hermes", "</think>"), ("harmony", "<|channel|>final<|message|>")]
)
def test_content_is_constrained_behind_the_thought_and_what_is_before_content(name, after):
    for begins_in_thought in (False, True):
        reader = AnswerReader(CASES[name].format(), AskedTools(), begins_in_thought)
        asked = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]"))
        _, prepared = reader.prepare(asked)
        constraint = prepared.structured_outputs
        assert constraint is not None and constraint.begins_after == after
        assert constraint.preamble == reader.format.before_body(begins_in_thought=begins_in_thought)


@pytest.mark.parametrize("name", ["harmony", "kimi-k3", "command", "hermes"])
def test_content_that_has_begun_may_go_on_with_calls_where_a_message_may_have_both(name):
    format = CASES[name].format()
    reader = AnswerReader(format, AskedTools.of([CLOCK]), continues_content=True)
    if format.calls_follow_content:
        _, prepared = reader.prepare(SamplingParams())
        assert prepared.structured_outputs is not None
    else:
        with pytest.raises(InvalidRequestError) as caught:
            reader.prepare(SamplingParams())
        assert caught.value.field == "continue_final_message"


def test_a_budget_goes_with_the_tags_of_the_format_and_needs_thoughts():
    reader = AnswerReader(CASES["harmony"].format(), AskedTools(), True)
    _, prepared = reader.prepare(SamplingParams(thinking_token_budget=3))
    texts = prepared.thought_texts
    assert texts is not None and texts.begins_inside
    assert texts.begin == "<|channel|>analysis<|message|>"
    with pytest.raises(InvalidRequestError) as caught:
        AnswerReader(CASES["xlam"].format(), AskedTools()).prepare(
            SamplingParams(thinking_token_budget=3)
        )
    assert caught.value.field == "thinking_token_budget"
