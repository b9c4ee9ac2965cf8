"""The ``openai`` package calls tools of a model that knows them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "qwen2.5-coder-0.5b"
ASK = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
FIELDS = {"model": MODEL, "temperature": 0, "max_tokens": 100}


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, coder_server) -> Iterator[Any]:
    with openai.OpenAI(base_url=coder_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, messages=ASK, **fields):
    return client.chat.completions.create(**FIELDS, messages=messages, **fields).choices[0]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_model_calls_a_tool(client, choice) -> None:
    answer = ask(client, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    call = answer.message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}


def test_a_named_tool_is_called(client) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    answer = ask(client, tools=[WEATHER, CLOCK], tool_choice=named)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("clock", "{}")


def test_tools_need_not_be_called(client) -> None:
    hello = [{"role": "user", "content": "Say hello in one word."}]
    for choice in ("auto", "none"):
        answer = ask(client, hello, tools=[WEATHER, CLOCK], tool_choice=choice)
        assert answer.finish_reason == "stop" and not answer.message.tool_calls
        assert answer.message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_has_the_same_calls(client, choice) -> None:
    whole = ask(client, tools=[WEATHER, CLOCK], tool_choice=choice).message
    fields = {**FIELDS, "messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    with client.chat.completions.stream(**fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = [
        [(call.function.name, call.function.arguments) for call in message.tool_calls]
        for message in (whole, answer.message)
    ]
    assert calls[0] == calls[1] and [event.name for event in done] == [name for name, _ in calls[1]]
    assert answer.message.tool_calls[0].function.parsed_arguments["city"] == "Paris"


def test_the_result_of_a_tool_goes_back_in(client) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees and sunny"}
    messages = [*ASK, answer.message, result]
    final = ask(client, messages, tools=[WEATHER], tool_choice="none")
    assert "21" in final.message.content


def test_a_wrong_tool_is_named(openai, client) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    broken = {"type": "function", "function": function}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[broken], tool_choice="required")
    assert caught.value.param.startswith("tools")
