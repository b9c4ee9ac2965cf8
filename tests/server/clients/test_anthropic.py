"""The ``anthropic`` package against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "qwen2.5-coder-0.5b"
HELLO = [{"role": "user", "content": "Say hello."}]
ASK = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
    },
}
# The package has no name for the temperature any more.
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic, coder_server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=coder_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_messages(client) -> None:
    answer = client.messages.create(**FIELDS, messages=HELLO, system="Answer in one word.")
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", MODEL)
    (block,) = answer.content
    assert block.type == "text" and block.text
    usage = answer.usage
    assert usage.output_tokens > 0 and usage.input_tokens + usage.cache_read_input_tokens > 10
    assert answer._request_id
    cut = client.messages.create(**FIELDS | {"max_tokens": 2}, messages=HELLO)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    stopped = client.messages.create(
        **FIELDS, messages=[{"role": "user", "content": "Count: 1 2 3"}], stop_sequences=["2"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "2")


def test_streams(client) -> None:
    whole = client.messages.create(**FIELDS, messages=HELLO)
    with client.messages.stream(**FIELDS, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tools(client) -> None:
    asked = {"messages": ASK, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    answer = client.messages.create(**FIELDS, **asked)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] == "Paris" and call.input["unit"] in ("celsius", "fahrenheit")
    with client.messages.stream(**FIELDS, **asked) as stream:
        partial = [event for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input and partial[-1].snapshot == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees, sunny"}
    messages = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    done = {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    final = client.messages.create(**FIELDS, messages=messages, **done)
    assert "21" in "".join(block.text for block in final.content if block.type == "text")


def test_structured_output(client) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        is_capital: bool

    ask = [{"role": "user", "content": "Tell me of Paris."}]
    answer = client.messages.parse(**FIELDS, messages=ask, output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_tokens_are_counted_and_cached(client) -> None:
    system = [{"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": MODEL, "messages": HELLO, "system": system}
    count = client.messages.count_tokens(**asked).input_tokens
    for turn in range(2):
        usage = client.messages.create(**FIELDS | asked).usage
        parts = (
            usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens,
        )  # fmt: skip
        assert sum(parts) == count
        assert usage.cache_read_input_tokens > 80 if turn else usage.cache_creation_input_tokens


def test_errors(anthropic, client, tiny_server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        client.messages.create(**FIELDS | {"model": "claude"}, messages=HELLO)
    assert caught.value.request_id and caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="block of type image"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(**FIELDS, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**FIELDS, messages=[{"role": "user", "content": "x y " * 9000}])
    for credentials in ({"api_key": "wrong"}, {"auth_token": "wrong"}):
        with (
            anthropic.Anthropic(base_url=tiny_server.url, max_retries=0, **credentials) as stranger,
            pytest.raises(anthropic.AuthenticationError),
        ):
            stranger.messages.count_tokens(model="tiny", messages=HELLO)
