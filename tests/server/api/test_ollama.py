"""Ollama's routes: lines, options, calls, what there is to know of models, and errors."""

from __future__ import annotations

import asyncio
import json

import pytest
from format_cases import TOOLS
from writing_engine import QWEN3, SHOWS, Writer, send, writing_service

from octavo.core.batch import TokenLogprobs
from octavo.server.api.ollama import routes
from octavo.server.api.ollama.answers import ChatResponse, GenerateResponse, ModelDescription
from octavo.server.app import create_server_app
from octavo.server.http.tenants import Tenants
from octavo.server.watch.metrics import Metrics
from octavo.serving.outputs import Delta

CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(create_service, create_test_app, byte_tokenizer):
    class Api:
        def __init__(self, *texts, **settings):
            self.service, self.engine = writing_service(create_service, *texts, **settings)
            self.app = create_test_app(routes.create_router(self.service))

        def send(self, method, path, **kwargs):
            return send(self.app, method, path, **kwargs)

        def chat(self, messages=USER, **body):
            return self.post("/api/chat", messages=messages, **body)

        def generate(self, prompt="Hello", **body):
            return self.post("/api/generate", prompt=prompt, **body)

        def post(self, path, expect=200, **body):
            response = self.send("POST", path, json={"model": "tiny", **body})
            assert response.status_code == expect, response.text
            if expect != 200:
                (error,) = response.json().values()
                return error
            if body.get("stream") is False:
                (ChatResponse if path == "/api/chat" else GenerateResponse).model_validate(
                    response.json()
                )
                return response.json()
            assert response.headers["content-type"] == "application/x-ndjson"
            lines = [json.loads(line) for line in response.text.splitlines()]
            assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
            return lines

        def prompt(self, number=-1):
            return byte_tokenizer.decode(self.engine.requests[number].prompt_token_ids)

        @property
        def params(self):
            return self.engine.requests[-1].params

    return Api


# -- answers -----------------------------------------------------------------------------------


def added_up(lines, name):
    """The parts that a stream adds up to."""
    found = {}
    for line in lines:
        for part, value in (line["message"] if name == "message" else line).items():
            if part in ("content", "thinking", "tool_calls", "response"):
                found[part] = found[part] + value if part in found else value
    return found


TEXT = f"<think>\nHm.\n</think>\n\nSo: {CALLS}"


@pytest.mark.parametrize("size", [1, 7, None])
def test_a_stream_tells_what_the_whole_answer_is(api, size):
    whole = api(TEXT).chat(tools=TOOLS, stream=False)
    message = whole["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert calls == [("get_weather", {"city": "Paris"}), ("clock", {})]
    assert (message["thinking"], message["content"].strip()) == ("Hm.", "So:")
    assert whole["done"] and whole["done_reason"] == "stop" and whole["eval_count"] == len(TEXT)
    assert whole["prompt_eval_count"] > 0 and whole["total_duration"] > 0
    lines = api(TEXT, size=size).chat(tools=TOOLS)
    streamed = added_up(lines, "message")
    assert [call["function"] for call in streamed.pop("tool_calls")] == [
        call["function"] for call in message["tool_calls"]
    ]
    assert streamed == {name: message[name] for name in streamed}
    assert lines[-1].keys() == whole.keys()


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_is_answered_and_its_context_goes_on(api, stream):
    server = api("Good day.")
    answer = server.generate(system="Be kind.", stream=stream)
    last = answer[-1] if stream else answer
    text = added_up(answer, "response")["response"] if stream else answer["response"]
    assert text == "Good day." and server.prompt().startswith("Be kind.Hello")
    prompt = server.engine.requests[0].prompt_token_ids
    assert last["context"] == [*prompt, *list(b"Good day.")]
    server.generate("More", context=last["context"], stream=False)
    assert server.engine.requests[1].prompt_token_ids[: len(last["context"])] == last["context"]
    assert server.prompt().endswith("More")


def test_a_raw_prompt_meets_no_template(api, byte_tokenizer):
    server = api("x")
    answer = server.generate("<|user|>Hi", raw=True, stream=False)
    assert server.engine.requests[0].prompt_token_ids == byte_tokenizer.encode(
        "<|user|>Hi", parse_special=True
    )
    assert "context" not in answer
    assert "no place" in server.generate(raw=True, system="x", expect=400)
    assert "filling in" in server.generate(suffix="x", expect=400)


def test_an_answer_ends_by_its_length(api):
    answer = api("x", reason="length").chat(stream=False, options={"num_predict": 1})
    assert answer["done_reason"] == "length"


def test_nothing_is_generated_where_only_the_model_is_wanted(api):
    server = api("x")
    assert server.chat(messages=[], stream=False)["done_reason"] == "load"
    assert server.generate("")[0]["done_reason"] == "load"
    assert server.engine.requests == []
    assert "keeps" in server.chat(messages=[], keep_alive=0, expect=400)
    for given in ("5m", 0, -1, "-1m", 2.5):
        assert server.chat(keep_alive=given)


def test_log_probabilities(api, monkeypatch, byte_tokenizer):
    (token,) = byte_tokenizer.encode("H", add_special_tokens=False)

    async def write(self, generation):
        entry = TokenLogprobs(token, -0.5, 1, ((token, -0.5),))
        generation.push([Delta(0, "H", [token], [entry], "stop")])

    monkeypatch.setattr(Writer, "write", write)
    server = api("")
    for stream in (True, False):
        answer = server.chat(logprobs=True, top_logprobs=1, stream=stream)
        (entry,) = (answer[0] if stream else answer)["logprobs"]
        assert (entry["token"], entry["logprob"]) == ("H", -0.5)
        assert entry["top_logprobs"][0]["token"] == "H"
    assert "needs logprobs" in server.chat(top_logprobs=1, expect=400)


# -- requests ----------------------------------------------------------------------------------


def test_messages_and_results_of_calls(api):
    server = api("x", template=SHOWS)
    server.chat(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "thinking": "Hm.", "tool_calls": [
                {"function": {"name": "f", "arguments": {"x": 1}}},
                {"function": {"name": "g", "arguments": {}}}]},
            {"role": "tool", "content": "of g", "tool_name": "g"},
            {"role": "tool", "content": "of f"},
        ]
    )  # fmt: skip
    assert server.prompt().startswith(
        '[system:S][user:a][assistant:(Hm.)b<tool_call>f{"x": 1}<tool_call>g{}]'
        "[tool:of g=g][tool:of f=f]"
    )


def test_options_are_sampling(api):
    server = api("x")
    server.chat(
        options={
            "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75,
            "repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "seed": 3, "stop": ["END"], "num_predict": 9, "num_gpu": 1,
        }
    )  # fmt: skip
    params = server.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.5, 0.25)
    assert (params.typical_p, params.repetition_penalty, params.seed) == (0.75, 1.5, 3)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (params.stop, params.max_tokens) == (("END",), 9)
    server.chat(options={"repeat_penalty": 1.5, "presence_penalty": 1.0, "repeat_last_n": 0})
    assert (server.params.repetition_penalty, server.params.presence_penalty) == (1.0, 0.0)
    server.chat(options={"top_p": 0.0, "temperature": 1.0})
    assert server.params.temperature == 0


def test_a_smaller_context_bounds_prompt_and_answer(api):
    server = api("x")
    server.chat(options={"num_ctx": 100, "num_predict": 1000})
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    assert server.params.max_tokens == 100 - num_prompt
    turns = [
        {"role": role, "content": "z" * 40} for _ in range(3) for role in ("user", "assistant")
    ]
    server.chat([*turns, *USER], options={"num_ctx": 100})
    assert len(server.engine.requests[1].prompt_token_ids) < 100
    assert server.prompt().endswith("zHello")
    assert "context length" in server.chat([{"role": "user", "content": "z" * 5000}], expect=400)
    server.chat(options={"num_ctx": 1 << 20})


def test_thinking_is_switched(api):
    server = api("x", template=SHOWS)
    for think, shown in ((True, "True"), (False, "False"), ("low", "True"), (None, "]")):
        server.chat(think=think)
        assert server.prompt().removesuffix("<think>").endswith(shown)


def test_a_format_holds_the_answer_to_a_schema(api):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server = api("{}")
    server.chat(format="json")
    assert server.params.structured_outputs.json_object
    for ask in (server.chat, server.generate):
        ask(format=schema)
        assert json.loads(server.params.structured_outputs.json) == schema
    server.chat(format="")
    assert server.params.structured_outputs is None


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400,
         "messages.0.images: is not supported"),
        ("chat", {"model": "other"}, 404, "model 'other' not found"),
        ("chat", {"options": {"mirostat": 1}}, 400, "options.mirostat: is not supported"),
        ("chat", {"options": {"temperature": -1}}, 400, "options.temperature: "),
        ("chat", {"options": {"max_tokens": 1}}, 400, "options.max_tokens: is not"),
        ("generate", {"template": "{{ .Prompt }}"}, 400, "template: is not supported"),
        ("generate", {"images": ["aGk="]}, 400, "images: is not supported"),
        ("show", {"model": "other"}, 404, "not found"),
        ("pull", {"model": "other"}, 404, "not found"),
        ("create", {}, 403, "operator's"),
        ("push", {}, 403, "operator's"),
        ("copy", {"source": "tiny", "destination": "x"}, 403, "operator's"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(api, path, body, status, says):
    assert says in api("x").post(f"/api/{path}", expect=status, **body)


def test_a_failure_within_a_stream_is_a_line(api, monkeypatch):
    async def write(self, generation):
        generation.push([Delta(0, "Hi", [72, 105])])
        await asyncio.sleep(0.01)
        generation.fail(RuntimeError("asked for"))

    monkeypatch.setattr(Writer, "write", write)
    response = api("").send("POST", "/api/chat", json={"model": "tiny", "messages": USER})
    assert json.loads(response.text.splitlines()[-1]) == {"error": "internal error"}


# -- models ------------------------------------------------------------------------------------


def test_models_are_described(api):
    server = api("x")
    models = server.send("GET", "/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["tiny", "also-tiny"]
    assert len(models[0]["digest"]) == 64 and models[0]["modified_at"].endswith("Z")
    (running, _) = server.send("GET", "/api/ps").json()["models"]
    assert running["expires_at"] and running["context_length"] == 4096
    for name in ("tiny", "tiny:latest"):
        shown = server.send("POST", "/api/show", json={"model": name}).json()
        ModelDescription.model_validate(shown)
    assert {"completion", "tools"} <= set(shown["capabilities"]) and shown["template"] == QWEN3
    assert server.send("POST", "/api/show", json={"name": "tiny"}).status_code == 200
    assert server.send("GET", "/api/version").json()["version"].count(".") == 2
    assert server.chat(model="tiny:latest")[-1]["model"] == "tiny:latest"
    pulled = server.send("POST", "/api/pull", json={"model": "tiny", "stream": False})
    assert pulled.json() == {"status": "success"}
    deleted = server.send("DELETE", "/api/delete", json={"model": "tiny"})
    assert deleted.status_code == 403


def test_errors_before_the_route_have_ollamas_form(create_service):
    service = create_service(Writer("x"), api_key=("secret",))
    object.__setattr__(service, "metrics", Metrics("tiny"))
    app = create_server_app(service, Tenants(service.settings))
    headers = {"host": "localhost"}
    refused = send(app, "GET", "/api/tags", headers=headers)
    assert refused.status_code == 401 and refused.json() == {"error": "An API key is needed."}
    headers["authorization"] = "Bearer secret"
    assert send(app, "GET", "/api/tags", headers=headers).status_code == 200
    assert isinstance(send(app, "GET", "/api/no", headers=headers).json()["error"], str)
    assert send(app, "HEAD", "/", headers=headers).status_code == 200
