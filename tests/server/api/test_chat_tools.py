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


def logprob_text(answer, stream):
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk["choices"]]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return bytes(int(-entry["logprob"]) for each in found for entry in each["content"]).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_all_tokens_in_their_order(api, stream):
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text = f"<think>Hm.</think>Yes.{call}"
    server = api(Writer(text, size=3), CASES["hermes"].format())
    asked = {"tools": TOOLS, "logprobs": True, "stream": stream, "joins": False}
    assert logprob_text(server.post(**asked), stream) == text
    # The first characters of the tag might have been text.
    hidden = logprob_text(server.post(**asked, include_reasoning=False), stream)
    assert hidden == f"<thinkYes.{call}"
    refused = {"tools": TOOLS, "top_logprobs": 2}
    assert server.post(400, **refused)["param"] == "top_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_calls_of_their_own(api, stream):
    texts = [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Paris", "Rome")
    ]
    server = api(Writer(*texts, "Neither.", size=4), CASES["hermes"].format())
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.post(n=3, tools=TOOLS, **options)
    found = [parts(choice)[2] for choice in answer["choices"]]
    assert found == [[("get_weather", f'{{"city": "{city}"}}')] for city in ("Paris", "Rome")] + [
        []
    ]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert reasons == ["tool_calls", "tool_calls", "stop"]
    assert len({c["message"]["tool_calls"][0]["id"] for c in answer["choices"][:2]}) == 2
    assert answer["usage"]["completion_tokens"] == sum(map(len, (*texts, "Neither.")))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_leaves_no_call_to_be_made(api, stream):
    """Stop strings are looked for in all that is written; the call is cut off, and says so."""
    whole = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    for before in ("", whole):
        server = api(Writer(before + cut, size=5), CASES["hermes"].format())
        (choice,) = server.post(tools=TOOLS, stop=["Par"], stream=stream)["choices"]
        assert choice["finish_reason"] == "stop" and "malformed" in choice["warnings"][0]
        assert parts(choice)[2][-1] == ("get_weather", '{"city": "')
    server = api(Writer("Hm", size=1), CASES["hermes"].format(), inside=True)
    (choice,) = server.post(stop=["."], stream=stream)["choices"]
    assert parts(choice) == ("Hm", None, []) and choice["finish_reason"] == "stop"


def test_fields_that_cannot_be_had_are_refused_by_name(api):
    for body in ({"echo": True}, {"functions": [{"name": "f"}]}, {"best_of": 2}):
        (name,) = body
        assert api(Writer("x"), QWEN3).post(400, **body)["param"] == name
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "continue_final_message" in api(Writer("x"), QWEN3).post(400, **both)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_read_whatever_the_client_says(api, stream):
    text = "[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]clock[ARGS]{}"
    for skips in (True, False):
        server = api(Writer(text, size=3), CASES["mistral-args"].format())
        asked = {"tools": TOOLS, "skip_special_tokens": skips, "stream": stream}
        (choice,) = server.post(**asked)["choices"]
        assert parts(choice) == ("Hm.", "Yes.", [("clock", "{}")])


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_continued_within_its_thought_or_its_content(api, stream):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{# <think> </think> #}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for begun, found in (
        ("<think>I wonder", (" whether.", "Yes.", [])),
        ("So", (None, " whether.</think>Yes.".replace("</think>", ""), [])),
    ):
        server = api(Writer(" whether.</think>Yes.", size=3), template)
        messages = [*USER, {"role": "assistant", "content": begun}]
        asked = {"continue_final_message": True, "stream": stream, "messages": messages}
        (choice,) = server.post(**asked)["choices"]
        reasoning, content, calls = parts(choice)
        assert ((reasoning or "").strip() or None, content, calls) == (
            found[0] and found[0].strip(),
            found[1],
            found[2],
        )
    server.post(**asked, response_format={"type": "json_object"})
    constraint = server.engine.requests[-1].params.structured_outputs
    assert constraint.preamble is None  # what is continued has neither a thought nor a header


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
                {"type": "function", "function": {"name": "f", "arguments": "[1"}}]}]},
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


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Par', '{"city": "Par"}'),
        ('{"city": "Paris", "days": [1, {"a": "\\u00', '{"city": "Paris", "days": [1, {"a": ""}]}'),
        ('{"city": "Paris", "da', '{"city": "Paris"}'),
        ("{", "{}"),
    ],
)
def test_a_call_that_was_cut_off_goes_back_in(api, byte_tokenizer, arguments, written):
    def prompt(template):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        server = api(Writer("x"), template)
        server.post(messages=[*USER, {"role": "assistant", "tool_calls": [call]}], tools=TOOLS)
        return byte_tokenizer.decode(server.engine.requests[0].prompt_token_ids)

    assert f'{{"name": "f", "arguments": {written}}}\n</tool_call>' in prompt(QWEN3)
    # A template that writes text as it is, and fails where it is an object.
    takes_text = QWEN3.replace("function.arguments | tojson", "function.arguments + ''")
    assert f'{{"name": "f", "arguments": {arguments}}}\n</tool_call>' in prompt(takes_text)


@pytest.mark.parametrize("arguments", ['{"a": 1} and more', '{"a" 1}', "no", '["a"]', "{" * 999])
def test_arguments_that_begin_no_object_are_refused(api, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    error = api(Writer("x"), QWEN3).post(400, messages=messages, tools=TOOLS)
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"


def test_an_effort_of_none_switches_thoughts_off(api, byte_tokenizer):
    def prompt(**body):
        server = api(Writer("x"), QWEN3)
        server.post(**body)
        return byte_tokenizer.decode(server.engine.requests[0].prompt_token_ids)

    assert prompt(reasoning_effort="none").endswith("</think>\n\n")
    assert not prompt(reasoning_effort="low").endswith("</think>\n\n")
    kept = {"chat_template_kwargs": {"enable_thinking": True}}
    assert not prompt(reasoning_effort="none", **kept).endswith("</think>\n\n")


def test_thinking_is_switched_where_the_template_knows_it(api, byte_tokenizer):
    server = api(Writer("x"), QWEN3)
    server.post(enable_thinking=False)
    prompt = byte_tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert prompt.endswith("</think>\n\n")
    server.post(enable_thinking=True, reasoning_effort="none")  # the switch itself goes first
    prompt = byte_tokenizer.decode(server.engine.requests[1].prompt_token_ids)
    assert prompt == "Hello"


def test_a_budget_of_thoughts_is_kept_by_the_tags_of_the_format_that_is_written(api):
    server = api(Writer("x"), CASES["mistral-args"].format(), inside=True)
    server.post(thinking_budget=7)
    texts = server.engine.requests[0].params.thought_texts
    assert (texts.begin, texts.ends) == ("[THINK]", ("[/THINK]", "[TOOL_CALLS]"))
    assert texts.closing == "[/THINK]" and texts.begins_inside
    error = api(Writer("x"), CASES["llama-json"].format()).post(400, thinking_budget=7)
    assert error["param"] == "thinking_token_budget"


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
    assert inside.preamble == hermes.before_body(begins_in_thought=True)
    maybe = asked(AnswerReader(hermes, AskedTools(), False, thoughts))
    assert maybe.preamble == hermes.before_body(begins_in_thought=False)
    both = asked(AnswerReader(hermes, AskedTools.of(TOOLS), False, thoughts))
    assert "<tool_call>" in both.grammar and "%json" in both.grammar
