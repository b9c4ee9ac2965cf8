from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "tool_calls.py"


@pytest.fixture(scope="module")
def tool_calls():
    spec = importlib.util.spec_from_file_location("tool_calls", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known(tool_calls) -> dict:
    return json.loads(tool_calls.PROMPTS.read_text())


def test_the_prompts_are_sixty_with_one_to_six_tools(known) -> None:
    prompts = known["prompts"]
    assert len({case["prompt"] for case in prompts}) == 60
    assert {len(case["tools"]) for case in prompts} == {1, 2, 3, 4, 5, 6}
    for case in prompts:
        assert case["call"] in case["tools"]
        properties = known["tools"][case["call"]]["parameters"]["properties"]
        for name, value in case["arguments"].items():
            jsonschema.validate(value, properties[name])
    for tool in known["tools"].values():
        jsonschema.Draft202012Validator.check_schema(tool["parameters"])


def message(name: str, arguments: str) -> dict:
    return {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        ({"content": "It is sunny.", "tool_calls": None}, (False, False, False)),
        (message("get_time", '{"city": "Paris"}'), (False, False, False)),
        (message("get_weather", '{"city": '), (True, False, False)),
        (message("get_weather", '{"city": 3}'), (True, False, False)),
        (message("get_weather", '{"city": "Rome"}'), (True, True, False)),
        (message("get_weather", '{"city": "paris", "unit": "celsius"}'), (True, True, True)),
    ],
)
def test_answers_are_judged(tool_calls, known, answer: dict, flags: tuple) -> None:
    (case,) = (each for each in known["prompts"] if each["arguments"] == {"city": "Paris"})
    assert tool_calls.judge(case, known["tools"], answer)[3:] == flags


def test_counts(tool_calls, known) -> None:
    (case,) = (each for each in known["prompts"] if each["arguments"] == {"city": "Paris"})
    answers = [{}, message("get_weather", "{}"), message("get_weather", '{"city": "Paris"}')]
    outcomes = [tool_calls.judge(case, known["tools"], answer) for answer in answers]
    assert tool_calls.counts(outcomes) == {
        "prompts": 3,
        "called": 2,
        "right_tool": 2,
        "right_tool_valid_arguments": 1,
        "right_values_too": 1,
    }
