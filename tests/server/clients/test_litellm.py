"""``litellm`` against a live server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "smollm2-135m"
HELLO = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = {"temperature": 0, "max_tokens": 7}


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
        litellm = pytest.importorskip("litellm")
        # It asks for the current event loop where there is none; this one is closed at the end.
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            asyncio.set_event_loop(loop)
            yield litellm
            asyncio.set_event_loop(None)


@pytest.fixture(scope="module")
def where(server) -> dict[str, Any]:
    return {"api_base": server.base_url, "api_key": "none", "num_retries": 0, "max_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat(litellm, where, provider) -> None:
    fields = {"model": f"{provider}/{MODEL}", "messages": HELLO, **where}
    whole = litellm.completion(**fields, **GREEDY)
    assert "Tokyo" in whole.choices[0].message.content
    assert whole.usage.completion_tokens == 7
    chunks = list(litellm.completion(**fields, **GREEDY, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == text


def test_parameters(litellm, where) -> None:
    def ask(**fields: Any) -> Any:
        fields = {"max_tokens": 7, "temperature": 0} | fields
        return litellm.completion(
            model=MODEL, custom_llm_provider="openai", messages=HELLO, **where, **fields
        )

    plain = ask()
    text = plain.choices[0].message.content
    assert ask(stop=["Tokyo"]).choices[0].message.content == text[: text.index("Tokyo")]
    assert ask(stop=["Tokyo"]).choices[0].finish_reason == "stop"
    assert len(ask(n=3, temperature=1).choices) == 3
    hot = {"temperature": 2.0, "seed": 5}
    first, second = ask(**hot), ask(**hot)
    assert first.choices[0].message.content == second.choices[0].message.content != text
    assert ask(**hot, top_k=1).choices[0].message.content == text
    assert ask(**hot, extra_body={"min_p": 1.0}).choices[0].message.content == text
    (entry, *_) = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert entry.token == "The" and len(entry.top_logprobs) == 2
    usage = [
        chunk.usage
        for chunk in ask(stream=True, stream_options={"include_usage": True})
        if getattr(chunk, "usage", None)
    ]
    assert usage[-1].completion_tokens == 7
    assert ask(max_completion_tokens=3, max_tokens=None).usage.completion_tokens == 3


def test_completions(litellm, where) -> None:
    fields = {"model": f"text-completion-openai/{MODEL}", "prompt": "The capital of France is"}
    whole = litellm.text_completion(**fields, **GREEDY, **where)
    assert whole.choices[0].text.startswith(" Paris")
    chunks = litellm.text_completion(**fields, **GREEDY, **where, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text
    echo = litellm.text_completion(**fields, **GREEDY, **where, echo=True, logprobs=1)
    assert echo.choices[0].text == fields["prompt"] + whole.choices[0].text


def test_async(litellm, where) -> None:
    fields = {"model": f"openai/{MODEL}", "messages": HELLO, **where, **GREEDY}

    async def ask() -> tuple[str, str]:
        whole = await litellm.acompletion(**fields)
        stream = await litellm.acompletion(**fields, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await litellm.close_litellm_async_clients()
        return whole.choices[0].message.content, "".join(pieces)

    whole, stream = asyncio.run(ask())
    assert whole == stream


def test_structured_output(litellm, where) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        is_capital: bool

    fields = {"model": f"openai/{MODEL}", "messages": HELLO, **where, "temperature": 0}
    answer = litellm.completion(**fields, response_format=City, max_tokens=100)
    City.model_validate_json(answer.choices[0].message.content)


def test_errors(litellm, where, tiny_server) -> None:
    ask = litellm.completion
    fields = {"model": f"openai/{MODEL}", "messages": HELLO, **where}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(**fields, temperature=3)
    wrong = {"name": "x", "schema": {"type": "objekt"}}
    with pytest.raises(litellm.BadRequestError, match="response_format.json_schema.schema"):
        ask(**fields, response_format={"type": "json_schema", "json_schema": wrong})
    with pytest.raises(litellm.NotFoundError, match="gpt-5-nano"):
        ask(**fields | {"model": "openai/gpt-5-nano"})
    tiny = fields | {"model": "openai/tiny", "api_base": tiny_server.base_url}
    with pytest.raises(litellm.AuthenticationError):
        ask(**tiny | {"api_key": "wrong-key"})
    tiny["api_key"] = "litellm-key"
    assert ask(**tiny, max_tokens=2).usage.completion_tokens >= 1
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(**tiny | {"messages": [{"role": "user", "content": "long " * 100}]})
    with pytest.raises(litellm.RateLimitError):
        for _ in range(200):
            ask(**tiny, max_tokens=1)


def test_tools(litellm, coder_server) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tool = {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": parameters,
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {
        "model": "openai/qwen2.5-coder-0.5b",
        "api_base": coder_server.base_url,
        "api_key": "none",
        "tools": [{"type": "function", "function": tool}],
        "temperature": 0,
        "max_tokens": 100,
    }
    answer = litellm.completion(**fields, messages=messages, tool_choice="required").choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    stream = litellm.completion(**fields, messages=messages, tool_choice="required", stream=True)
    built = litellm.stream_chunk_builder(list(stream))
    (streamed,) = built.choices[0].message.tool_calls
    assert streamed.function == call.function

    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    answer = litellm.completion(**fields, messages=messages, tool_choice="none").choices[0]
    assert answer.message.content
