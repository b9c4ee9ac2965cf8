"""Chats with tools and thoughts: every format through HTTP, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
from format_cases import CASES, TOOLS, WEATHER
from writing_engine import QWEN3, Observer, Rendered, Writer

from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.thoughts import ThoughtTokens
from octavo.server.api import chat_answer
from octavo.server.api.openai import chat_completions as chat
from octavo.server.api.openai.chat_body import ChatCompletion, ChatCompletionChunk
from octavo.serving.answer_reader import AnswerReader, AskedTools

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(create_service, create_test_app, byte_tokenizer):
    class Api:
        def __init__(self, engine, format=None, *, inside=False, **settings):
            self.engine, self.observer = engine, Observer()
            service = create_service(engine, **settings)
            object.__setattr__(service, "observer", self.observer)
            if isinstance(format, str):
                service.prompts._chat_template = format
            elif format is not None:
                rendered = Rendered(byte_tokenizer, format, inside=inside)
                object.__setattr__(service, "prompts", rendered)
            self.app = create_test_app(chat.create_router(service))

        def post(self, expect=200, joins=True, **body):
            async def send():
                transport = httpx.ASGITransport(self.app)
                async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                    return await client.post(
                        "/v1/chat/completions", json={"messages": USER, **body}
                    )

            response = asyncio.run(send())
            assert response.status_code == expect, response.text
            if expect != 200:
                return response.json()["error"]
            if not body.get("stream"):
                ChatCompletion.model_validate(response.json())
                return response.json()
            *events, _, _ = response.text.split("\n\n")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            for chunk in chunks:
                ChatCompletionChunk.model_validate(chunk)
            return joined(chunks) if joins else chunks

    return Api


def joined(chunks):
    """Return the answer that chunks add up to, as clients add them."""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {}})
            whole |= {k: v for k, v in choice.items() if k != "delta" and v is not None}
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    add_calls(whole["message"].setdefault(name, []), value)
                elif name != "role":
                    whole["message"][name] = whole["message"].get(name, "") + value
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def add_calls(calls, pieces):
    for piece in pieces:
        if piece["index"] == len(calls):
            assert piece["id"] and piece["type"] == "function"
            calls.append({"id": piece["id"], "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def parts(choice):
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    assert all(call["id"] for call in message.get("tool_calls", ()))
    return message.get("reasoning"), message["content"] or None, calls


@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("name", CASES)
def test_every_format_is_read_whole_and_streamed(api, name, strict):
    """With ``strict`` false no grammar keeps calls valid, and they leave when they are whole."""
    case = CASES[name]
    tools = json.loads(json.dumps(TOOLS))
    for tool in tools:
        tool["function"]["strict"] = strict
    for text, (reasoning, content, calls) in case.texts.items():
        for options in ({}, {"stream": True}):
            for size in (1, 7, None):
                server = api(Writer(text, size=size), case.format())
                (choice,) = server.post(tools=tools, **options)["choices"]
                found = parts(choice)
                assert found == (reasoning, content, calls), (text, size)
                assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
                assert server.observer.noted == ([(name, len(calls), [])] if calls else [])
        params = server.engine.requests[0].params
        assert params.skip_special_tokens is False
        assert (params.structured_outputs is None) == (strict is False)


def test_a_malformed_call_is_content_with_a_warning(api):
    text = 'So: <tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>'
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    for stream in (False, True):
        server = api(Writer(text, size=3), QWEN3)
        (choice,) = server.post(tools=[tool], stream=stream)["choices"]
        content = 'So: \n{"name": "get_weather", "arguments": {"city": \n'
        assert choice["message"]["content"] == content and choice["finish_reason"] == "stop"
        (warning,) = choice["warnings"]
        assert "malformed" in warning
        ((name, calls, reasons),) = server.observer.noted
        assert (name, calls, len(reasons)) == ("hermes", 0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_and_counted(api, stream):
    text = "<think>\nHm.\n</think>\n\nYes."
    options = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    answer = api(Writer(text, text, size=5), CASES["hermes"].format()).post(n=2, **options)
    assert [parts(choice) for choice in answer["choices"]] == [("Hm.", "Yes.", [])] * 2
    # A token is a byte here; those behind the first tag count, up to the end of the last.
    expected = 2 * len("\nHm.\n</think>")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_may_be_left_out_or_in_the_content(api, stream):
    text = "Hm.\n</think>\n\nYes."
    server = api(Writer(text, size=2), CASES["hermes"].format(), inside=True)
    (choice,) = server.post(stream=stream)["choices"]
    assert parts(choice) == ("Hm.", "Yes.", [])
    (choice,) = server.post(stream=stream, include_reasoning=False)["choices"]
    assert parts(choice) == (None, "Yes.", [])
    (choice,) = server.post(stream=stream, separate_reasoning=False)["choices"]
    assert parts(choice) == (None, "<think>Hm.</think>Yes.", [])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_all_that_was_written(api, stream):
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    server = api(Writer(text, size=5), CASES["hermes"].format())
    asked = {"tools": TOOLS, "return_token_ids": True, "stream": stream}
    answer = server.post(joins=False, **asked)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert ids == list(text.encode())


def test_a_long_answer_is_parsed_beside_the_event_loop(api, monkeypatch):
    threads = set()
    read = chat_answer.read_delta

    def noting(*arguments):
        threads.add(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(chat_answer, "read_delta", noting)
    for stream in (False, True):
        text = "x" * 40_000
        (choice,) = api(Writer(text), QWEN3).post(tools=TOOLS, stream=stream)["choices"]
        assert choice["message"]["content"] == text
    long = threads - {threading.main_thread().name}
    assert long, threads


def test_what_has_no_parts_is_content_as_it_is(api):
    text = "<tool_call>  {} </think> "
    for stream in (False, True):
        server = api(Writer(text, size=4))
        (choice,) = server.post(stream=stream)["choices"]
        assert choice["message"]["content"] == text
        params = server.engine.requests[0].params
        assert params.skip_special_tokens and params.structured_outputs is None


def test_calls_that_are_cut_off_end_by_their_length(api):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    server = api(Writer(text, reason="length"), QWEN3)
    (choice,) = server.post(tools=[WEATHER], tool_choice="required")["choices"]
    assert choice["finish_reason"] == "length"
    assert parts(choice)[2] == [("get_weather", '{"city": "Par')]


NAMED = {"type": "function", "function": {"name": "clock"}}


def test_choices_of_tools_constrain_the_answer(api):
    def constraint(**body):
        server = api(Writer("x"), QWEN3)
        server.post(tools=TOOLS, **body)
        return server.engine.requests[0].params.structured_outputs

    sources = {
        name: constraint(tool_choice=choice)
        for name, choice in {
            "auto": "auto",
            "required": "required",
            "named": NAMED,
            "allowed": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED]},
            },
        }.items()
    }
    assert len({source.grammar for source in sources.values()}) == 4
    assert constraint() == sources["auto"] and constraint(tool_choice="none") is None
    assert "get_weather" not in sources["named"].grammar
    one = constraint(tool_choice="required", parallel_tool_calls=False)
    assert one.grammar != sources["required"].grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(api, body, param):
    assert api(Writer("x"), QWEN3).post(400, **body)["param"] == param


def test_a_conversation_of_an_agent_goes_back_in(api, byte_tokenizer):
    def prompt(arguments):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "reasoning": "Hm.",
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "21", "tool_call_id": "c1"},
        ]
        server = api(Writer("x"), QWEN3)
        server.post(messages=messages, tools=TOOLS)
        return byte_tokenizer.decode(server.engine.requests[0].prompt_token_ids)

    assert prompt('{"x":1}') == prompt({"x": 1})
    assert '{"name": "f", "arguments": {"x": 1}}\n</tool_call>21' in prompt({"x": 1})


def test_an_effort_of_none_switches_thoughts_off(api, byte_tokenizer):
    def prompt(**body):
        server = api(Writer("x"), QWEN3)
        server.post(**body)
        return byte_tokenizer.decode(server.engine.requests[0].prompt_token_ids)

    assert prompt(reasoning_effort="none").endswith("</think>\n\n")
    assert not prompt(reasoning_effort="low").endswith("</think>\n\n")
    kept = {"chat_template_kwargs": {"enable_thinking": True}}
    assert not prompt(reasoning_effort="none", **kept).endswith("</think>\n\n")


def test_a_budget_of_thoughts_goes_to_the_engine_by_any_of_its_names(api):
    for name in ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"):
        server = api(Writer("x"), QWEN3)
        server.post(**{name: 7})
        assert server.engine.requests[0].params.thinking_token_budget == 7


def test_constraints_of_the_content_begin_after_thoughts():
    hermes = CASES["hermes"].format()
    thoughts = ThoughtTokens(b"<think>", (b"</think>",), lambda token: b"")
    schema = StructuredOutputs(json={"type": "object"})

    def asked(reader):
        _, params = reader.prepare(SamplingParams(structured_outputs=schema))
        return params.structured_outputs

    inside = asked(AnswerReader(hermes, AskedTools(), True, thoughts))
    assert (inside.begins_with, inside.begins_after) == (None, "</think>")
    maybe = asked(AnswerReader(hermes, AskedTools(), False, thoughts))
    assert (maybe.begins_with, maybe.begins_after) == ("<think>", "</think>")
    both = asked(AnswerReader(hermes, AskedTools.of(TOOLS), False, thoughts))
    assert "<tool_call>" in both.grammar and "%json" in both.grammar
