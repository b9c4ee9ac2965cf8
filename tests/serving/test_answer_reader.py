from __future__ import annotations

import pytest
from format_cases import CASES

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
