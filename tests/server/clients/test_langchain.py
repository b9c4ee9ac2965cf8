"""``langchain-openai`` against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "smollm2-135m"
QUESTION = "What is the capital of Japan?"


@pytest.fixture(scope="module")
def langchain_openai():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
            patch.setenv(name, "false")
        yield pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def where(server) -> Iterator[dict[str, Any]]:
    """What makes a model of ours. With connections of its own, which end with the tests."""
    with httpx.Client() as client:
        yield {
            "base_url": server.base_url,
            "api_key": "none",
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 7,
            "max_retries": 0,
            "http_client": client,
        }


@pytest.fixture(scope="module")
def chat(langchain_openai, where):
    return langchain_openai.ChatOpenAI(**where, stream_usage=True)


def test_invoke_and_stream(chat) -> None:
    answer = chat.invoke(QUESTION)
    assert "Tokyo" in answer.content
    assert answer.usage_metadata["output_tokens"] == 7
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL

    chunks = list(chat.stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == answer.content and len(chunks) > 2
    assert whole.usage_metadata["output_tokens"] == 7
    assert whole.response_metadata["finish_reason"] == "length"


def test_conversation(langchain_openai, chat) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    first = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    again = [HumanMessage(QUESTION), first, HumanMessage("And of France?")]
    assert isinstance(chat.invoke(again), AIMessage)  # what it answers is welcome as a message

    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    chain = prompt | chat | StrOutputParser()
    assert "Tokyo" in chain.invoke({"country": "Japan"})
    assert "".join(chain.stream({"country": "Japan"})) == chain.invoke({"country": "Japan"})


def test_batch_and_async(langchain_openai, where, chat) -> None:
    questions = [f"What is {number} + 1?" for number in range(6)]
    alone = [chat.invoke(question).content for question in questions]
    assert [answer.content for answer in chat.batch(questions)] == alone

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            chat = langchain_openai.ChatOpenAI(**where, http_async_client=client)
            answers = await chat.abatch(questions)
            assert [answer.content for answer in answers] == alone
            pieces = [chunk.content async for chunk in chat.astream(questions[0])]
            assert "".join(pieces) == alone[0]

    asyncio.run(ask())


def test_bind(chat) -> None:
    from langchain_core.messages import HumanMessage

    text = chat.invoke(QUESTION).content
    stopped = chat.bind(stop=["Tokyo"]).invoke(QUESTION)
    assert stopped.content == text[: text.index("Tokyo")]
    assert stopped.response_metadata["finish_reason"] == "stop"

    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    hot = chat.bind(temperature=2.0, seed=3, extra_body={"top_k": 1})
    assert hot.invoke(QUESTION).content == text
    two = chat.generate([[HumanMessage(QUESTION)]], n=2).generations[0]
    assert [generation.text for generation in two] == [text, text]


def test_completions(langchain_openai, where) -> None:
    llm = langchain_openai.OpenAI(**where)
    prompt = "The capital of France is"
    text = llm.invoke(prompt)
    assert text.startswith(" Paris")
    assert "".join(llm.stream(prompt)) == text
    result = llm.generate([prompt, "Water boils at"], stop=["."])
    assert result.generations[0][0].text == text[: text.index(".")]
    assert result.llm_output["token_usage"]["completion_tokens"] >= 2


def test_structured_output(chat) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel, extra="forbid"):
        name: str = Field(max_length=20)
        is_capital: bool

    asked = chat.with_structured_output(City, method="json_schema")
    city = asked.invoke(QUESTION, max_tokens=100)
    assert isinstance(city, City)
    assert list(asked.stream(QUESTION, max_tokens=100))[-1] == city
    asked = chat.with_structured_output(City.model_json_schema(), method="json_schema")
    assert asked.invoke(QUESTION, max_tokens=100) == city.model_dump()


def test_errors(chat) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="tool"):
        chat.bind(tools=[{"type": "function", "function": {"name": ""}}]).invoke(QUESTION)
    with pytest.raises(openai.NotFoundError):
        chat.bind(model="gpt-5-nano").invoke(QUESTION)


@pytest.fixture(scope="module")
def coder(langchain_openai, where, coder_server):
    """A model that knows tools."""
    fields = where | {"base_url": coder_server.base_url, "max_tokens": 100}
    return langchain_openai.ChatOpenAI(**fields | {"model": "qwen2.5-coder-0.5b"})


def test_tools(coder) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from pydantic import BaseModel

    class GetWeather(BaseModel):
        """Return the weather of a city."""

        city: str

    question = "What is the weather in Paris?"
    bound = coder.bind_tools([GetWeather], tool_choice="any")
    answer = bound.invoke(question)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("GetWeather", {"city": "Paris"})
    first, *others = bound.stream(question)
    (streamed,) = sum(others, first).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])

    talk = [HumanMessage(question), answer, ToolMessage("Sunny.", tool_call_id=call["id"])]
    assert coder.bind_tools([GetWeather], tool_choice="none").invoke(talk).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structure_of_a_model_that_knows_tools(coder, method: str) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        """A city of a country."""

        name: str
        country: str

    question = "Paris is in France. Answer in JSON, with the keys name and country."
    asked = coder.with_structured_output(City, method=method)
    assert asked.invoke(question) == City(name="Paris", country="France")
