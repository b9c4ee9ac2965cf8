"""``/v1/messages``: blocks in and out, every event in its order, usage, and errors."""

from __future__ import annotations

import asyncio
import json

import pytest
from format_cases import CASES, TOOLS
from writing_engine import QWEN3, SHOWS, Writer, named_events, send, writing_service

from octavo.server.api.anthropic import routes
from octavo.server.api.anthropic.answers import AnswerMessage
from octavo.server.app import create_server_app
from octavo.server.http.tenants import Tenants
from octavo.server.watch.metrics import Metrics
from octavo.serving.outputs import Delta

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLAUDE_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"].get("parameters") or {"type": "object"},
    }
    for tool in TOOLS
]
PATH = "/v1/messages"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(create_service, create_test_app, byte_tokenizer):
    class Api:
        def __init__(self, *texts, **settings):
            service, self.engine = writing_service(create_service, *texts, **settings)
            self.app = create_test_app(routes.create_router(service))

        def post(self, messages=USER, expect=200, path=PATH, headers=None, **body):
            if path == PATH:
                body = {"max_tokens": 100, **body}
            body = {"messages": messages, **body}
            response = send(self.app, "POST", path, json=body, headers=headers)
            assert response.status_code == expect, response.text
            assert response.headers["request-id"] == "req-1"
            if expect != 200:
                assert response.json()["type"] == "error"
                assert response.json()["request_id"] == "req-1"
                return response.json()["error"]
            if body.get("stream"):
                return named_events(response)
            if path == PATH:
                AnswerMessage.model_validate(response.json())
            return response.json()

        def prompt(self, number=-1):
            return byte_tokenizer.decode(self.engine.requests[number].prompt_token_ids)

        @property
        def params(self):
            return self.engine.requests[-1].params

    return Api


# -- answers -----------------------------------------------------------------------------------


def test_a_message_is_answered(api):
    server = api("Good day.")
    answer = server.post(system="Be kind.", model="tiny", temperature=0, top_k=3, top_p=0.5)
    assert answer["content"] == [{"type": "text", "text": "Good day."}]
    assert (answer["role"], answer["model"], answer["type"]) == ("assistant", "tiny", "message")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["input_tokens"] == len(server.engine.requests[0].prompt_token_ids)
    assert answer["usage"]["output_tokens"] == len("Good day.")
    assert server.prompt().startswith("Be kind.Hello")
    params = server.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0, 3, 0.5, 100)


TEXT = f"<think>\nHm.\n</think>\n\nSo: {CALL}"
EVENTS = [
    "message_start", "ping",
    "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
    "content_block_start", "content_block_delta", "content_block_stop",
    "content_block_start", "content_block_delta", "content_block_stop",
    "message_delta", "message_stop",
]  # fmt: skip


def added_up(events):
    """The message that a stream adds up to, as Anthropic's clients add it."""
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta["type"]
            if kind == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                name = kind.removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return message


@pytest.mark.parametrize("size", [1, 7, None])
def test_a_stream_tells_what_the_whole_answer_is(api, size):
    whole = api(TEXT).post(tools=CLAUDE_TOOLS)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "Hm." and whole["content"][0]["signature"]
    call = whole["content"][2]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    assert whole["stop_reason"] == "tool_use"
    events = api(TEXT, size=size).post(tools=CLAUDE_TOOLS, stream=True)
    if size is None:
        assert [event["type"] for event in events] == EVENTS
    found = added_up(events)
    call["id"] = found["content"][2]["id"]
    assert found == whole | {"id": found["id"]}


@pytest.mark.parametrize("name", CASES)
def test_every_format_has_its_parts_as_blocks(api, name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr("octavo.serving.chat_templates.format_of", lambda *_: case.format())
    for text, (reasoning, content, calls) in case.texts.items():
        answer = added_up(api(text, size=7).post(tools=CLAUDE_TOOLS, stream=True))
        blocks = answer["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        found = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        assert ("".join(thoughts) or None, "".join(texts) or None) == (reasoning, content)
        assert found == [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_stops_are_told(api, stream, monkeypatch):
    def stopped(server, **body):
        answer = server.post(stream=stream, **body)
        answer = added_up(answer) if stream else answer
        return answer["stop_reason"], answer["stop_sequence"]

    assert stopped(api("x", reason="length"), max_tokens=1) == ("max_tokens", None)
    full = stopped(api("x", reason="length"), max_tokens=100_000)
    assert full == ("model_context_window_exceeded", None)

    async def write(self, generation):
        generation.push([Delta(0, "x", [1], [], "stop", "END")])

    monkeypatch.setattr(Writer, "write", write)
    server = api("")
    assert stopped(server, stop_sequences=["END"]) == ("stop_sequence", "END")
    assert server.params.stop == ("END",)


def test_a_call_that_is_cut_off_has_no_input_yet(api):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    answer = api(text, reason="length").post(tools=CLAUDE_TOOLS, tool_choice={"type": "any"})
    assert answer["content"][0]["input"] == {} and answer["stop_reason"] == "max_tokens"


def test_thoughts_may_be_omitted(api):
    for stream in (False, True):
        server = api("<think>Hm.</think>Yes.")
        answer = server.post(thinking={"type": "adaptive", "display": "omitted"}, stream=stream)
        thought, text = (added_up(answer) if stream else answer)["content"]
        assert thought["thinking"] == "" and thought["signature"] and text["text"] == "Yes."


def test_cached_tokens_are_counted_apart(api, monkeypatch):
    async def write(self, generation):
        generation.stats.num_cached_tokens = 16
        generation.push([Delta(0, "x", [1], [], "stop")])

    monkeypatch.setattr(Writer, "write", write)
    server = api("")
    text = "z" * 40
    usage = server.post([{"role": "user", "content": text}])["usage"]
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    assert usage["cache_read_input_tokens"] == 16 and usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] == num_prompt - 16
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    usage = server.post([{"role": "user", "content": marked}])["usage"]
    created = num_prompt // 16 * 16 - 16
    assert usage["cache_creation_input_tokens"] == created
    assert usage["input_tokens"] == num_prompt - 16 - created


# -- conversations -----------------------------------------------------------------------------


def test_blocks_become_messages(api):
    server = api("x", template=SHOWS)
    server.post(
        [
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                {"type": "text", "text": "d"}]},
            {"role": "user", "content": "e"},
        ],
        system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T"}],
    )  # fmt: skip
    assert server.prompt().startswith(
        '[system:S\n\nT][user:a\n\nb][assistant:(Hm.)c<tool_call>f{"x": 1}<tool_call>g{}]'
        "[tool:r=f][tool:The tool failed.=g][user:d\n\ne]"
    )


def test_an_assistants_last_message_is_continued(api):
    server = api("loud.")
    server.post([*USER, {"role": "assistant", "content": "The sky is"}])
    assert server.prompt() == "HelloThe sky is"


def test_thinking_is_switched_and_bounded(api):
    server = api("x", template=SHOWS)
    for thinking, shown in (
        ({"type": "enabled", "budget_tokens": 7}, "True"),
        ({"type": "disabled"}, "False"),
        (None, "]"),
    ):
        server.post(thinking=thinking)
        assert server.prompt().removesuffix("<think>").endswith(shown)
        assert server.params.thinking_token_budget == (7 if shown == "True" else None)
    # A model without thoughts answers without one.
    server = api("x", template="{{ messages }}")
    server.post(thinking={"type": "enabled", "budget_tokens": 7})
    assert server.params.thinking_token_budget is None


def test_choices_of_tools(api):
    def grammar(choice):
        server = api("x")
        server.post(tools=CLAUDE_TOOLS, tool_choice=choice)
        constraint = server.params.structured_outputs
        return None if constraint is None else constraint.grammar, server.prompt()

    auto, prompt = grammar({"type": "auto"})
    assert "get_weather" in prompt and grammar(None)[0] == auto
    named = grammar({"type": "tool", "name": "clock"})[0]
    several = grammar({"type": "any"})[0]
    one = grammar({"type": "any", "disable_parallel_tool_use": True})[0]
    assert len({auto, named, several, one}) == 4
    assert grammar({"type": "none"})[0] is None
    assert "get_weather" not in grammar({"type": "none"})[1]


def test_a_format_holds_the_answer_to_a_schema(api):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": asked}}, {"output_format": asked}):
        server = api("{}")
        server.post(**body)
        assert json.loads(server.params.structured_outputs.json) == schema


def test_tokens_are_counted(api):
    server = api("x")
    asked = {"system": "Be kind.", "tools": CLAUDE_TOOLS}
    counted = server.post(path=f"{PATH}/count_tokens", **asked)
    assert counted == {"input_tokens": server.post(**asked)["usage"]["input_tokens"]}
    assert len(server.engine.requests) == 1


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages.0.content.0: a block of type image is not supported"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools.0: a tool of type web_search_20250305 is Anthropic's own"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice: no"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers: is not supported"),
        ({"seed": 1}, "seed: is not a known field"),
        ({"model": "claude"}, "model: The model 'claude' does not exist"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context length"),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(api, body, says):
    expect = 404 if "model" in body else 400
    error = api("x").post(expect=expect, **body)
    assert says in error["message"]
    assert error["type"] == ("not_found_error" if expect == 404 else "invalid_request_error")


def test_versions_of_the_api(api):
    server = api("x")
    for version in ("2023-06-01", "2026-10-21"):
        server.post(headers={"anthropic-version": version, "anthropic-beta": "a-2025-01-01"})
    error = server.post(headers={"anthropic-version": "newest"}, expect=400)
    assert error["message"].startswith("anthropic-version")


def test_a_failure_within_a_stream_is_an_event(api, monkeypatch):
    async def write(self, generation):
        generation.push([Delta(0, "Hi", [72, 105])])
        await asyncio.sleep(0.01)
        generation.fail(RuntimeError("asked for"))

    monkeypatch.setattr(Writer, "write", write)
    last = api("").post(stream=True)[-1]
    assert last["error"] == {"type": "api_error", "message": "internal error"}
    assert last["request_id"] == "req-1"


def test_errors_before_the_route_have_anthropics_form_and_its_key_is_known(create_service):
    service = create_service(Writer("x"), api_key=("secret",), max_body_bytes=1000)
    object.__setattr__(service, "metrics", Metrics("tiny"))
    service.prompts._chat_template = QWEN3
    app = create_server_app(service, Tenants(service.settings))
    body = {"messages": USER, "max_tokens": 1}

    def ask(path=PATH, json=body, **headers):
        return send(app, "POST", path, json=json, headers={"host": "localhost", **headers})

    refused = ask(**{"x-api-key": "wrong", "x-request-id": "mine"})
    assert refused.status_code == 401 and refused.headers["request-id"] == "mine"
    assert refused.json() == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "The API key is wrong."},
        "request_id": "mine",
    }
    for key in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert ask(**key).status_code == 200
    large = ask(json=body | {"system": "x" * 1000}, **{"x-api-key": "secret"})
    assert large.json()["error"]["type"] == "request_too_large"
    lost = ask("/v1/messages/batches", **{"x-api-key": "secret"})
    assert lost.status_code == 404 and lost.json()["error"]["type"] == "not_found_error"
    assert "code" in ask("/v1/nothing", **{"x-api-key": "secret"}).json()["error"]
