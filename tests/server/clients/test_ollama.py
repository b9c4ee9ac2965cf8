"""The ``ollama`` package against a live server."""

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
HELLO = [{"role": "user", "content": "Say hello."}]
FEW = {"num_predict": 40, "temperature": 0}


@pytest.fixture(scope="module")
def ollama():
    return pytest.importorskip("ollama")


@pytest.fixture(scope="module")
def client(ollama, coder_server) -> Iterator[Any]:
    client = ollama.Client(host=coder_server.url)
    yield client
    client._client.close()


def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name.
    """
    return f"21 degrees and sunny in {city}"


def test_chat(client) -> None:
    answer = client.chat(MODEL, messages=HELLO, options=FEW)
    assert answer.done and answer.done_reason == "stop" and answer.message.content
    assert answer.eval_count > 0 and answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.eval_duration > 0
    chunks = list(client.chat(MODEL, messages=HELLO, options=FEW, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == answer.message.content
    assert chunks[-1].done and chunks[-1].eval_count == answer.eval_count
    cut = client.chat(MODEL, messages=HELLO, options=FEW | {"num_predict": 2})
    assert cut.done_reason == "length" and cut.eval_count == 2


def test_generate(client) -> None:
    first = client.generate(MODEL, "My name is Ann. Say hello.", options=FEW)
    assert first.response and first.context
    options = FEW | {"num_predict": 5}
    again = client.generate(MODEL, "And again.", context=first.context, options=options)
    assert again.context[: len(first.context)] == first.context
    raw = client.generate(MODEL, "def add(a, b):\n    return", raw=True, options=options)
    assert "a + b" in raw.response and raw.context is None


def test_a_gap_is_filled_in(client) -> None:
    answer = client.generate(
        MODEL, "def add(a, b):\n    ", suffix="\n\nprint(add(1, 2))", options=FEW
    )
    assert "return" in answer.response


def test_tools(client) -> None:
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat(MODEL, messages=ask, tools=[get_weather], options=FEW)
    (call,) = answer.message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    chunks = list(client.chat(MODEL, messages=ask, tools=[get_weather], options=FEW, stream=True))
    (streamed,) = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert streamed.function == call.function
    result = get_weather(**call.function.arguments)
    messages = [
        *ask,
        answer.message,
        {"role": "tool", "content": result, "tool_name": "get_weather"},
    ]
    final = client.chat(MODEL, messages=messages, options=FEW)
    assert "21" in final.message.content


def test_format(client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for form in (schema, "json"):
        answer = client.chat(MODEL, messages=HELLO, format=form, options=FEW | {"num_predict": 80})
        found = json.loads(answer.message.content)
        assert isinstance(found, dict) and (form == "json" or set(found) == {"name", "age"})


def test_models(client) -> None:
    (model,) = client.list().models
    assert model.model == MODEL and model.size > 1e8
    (running,) = client.ps().models
    assert running.model == MODEL and running.context_length == 8192
    shown = client.show(MODEL)
    assert {"completion", "tools", "insert"} <= set(shown.capabilities)
    assert shown.modelinfo["general.architecture"] == "qwen2" and shown.template
    assert client.pull(MODEL).status == "success"


def test_errors(ollama, client) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("llama3", messages=HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.chat("llama3", messages=HELLO, stream=True))
    with pytest.raises(ollama.ResponseError, match="operator"):
        client.delete(MODEL)
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(MODEL, messages=[{"role": "user", "content": "x", "images": ["aGk="]}])
