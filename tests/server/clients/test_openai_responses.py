"""The ``openai`` package's Responses against a live server."""

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
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FIELDS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, coder_server) -> Iterator[Any]:
    with openai.OpenAI(base_url=coder_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_kept_and_followed(openai, client) -> None:
    first = client.responses.create(**FIELDS, input="My name is Ann.", instructions="Be brief.")
    assert first.status == "completed" and first.output_text and first.usage.total_tokens > 10
    assert client.responses.retrieve(first.id).output_text == first.output_text
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == "My name is Ann."
    second = client.responses.create(
        **FIELDS, input="What is my name?", previous_response_id=first.id
    )
    assert "Ann" in second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    cut = client.responses.create(**FIELDS | {"max_output_tokens": 2}, input="Hello")
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    counted = client.responses.input_tokens.count(model=MODEL, input="Hello")
    assert counted.input_tokens == cut.usage.input_tokens


def test_streams(client) -> None:
    whole = client.responses.create(**FIELDS, input="Say hello.")
    with client.responses.stream(**FIELDS, input="Say hello.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tools(client) -> None:
    asked = {
        "input": "What is the weather in Paris?",
        "tools": [WEATHER],
        "tool_choice": "required",
    }
    answer = client.responses.create(**FIELDS, **asked)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    with client.responses.stream(**FIELDS, **asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert {"response.function_call_arguments.delta", "response.completed"} <= kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    final = client.responses.create(
        **FIELDS, input=[result], tool_choice="none", previous_response_id=answer.id
    )
    assert "21" in final.output_text


def test_structured_output(client) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        is_capital: bool

    answer = client.responses.parse(**FIELDS, input="Tell me of Paris.", text_format=City)
    assert isinstance(answer.output_parsed, City)


def test_errors(openai, client) -> None:
    with pytest.raises(openai.BadRequestError, match="input_image") as caught:
        part = {"type": "input_image", "image_url": "http://x"}
        client.responses.create(**FIELDS, input=[{"role": "user", "content": [part]}])
    assert caught.value.param == "input.0.content.0"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**FIELDS | {"model": "gpt-5"}, input="Hello")
