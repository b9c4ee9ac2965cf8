"""``/v1/responses``: items in and out, every event in its order, and what is kept."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from format_cases import TOOLS
from writing_engine import Writer, named_events, send, writing_service

from octavo.core.batch import TokenLogprobs
from octavo.server.api.openai.responses import routes
from octavo.server.api.openai.responses.answers import ResponseObject
from octavo.server.api.openai.responses.store import KeptResponse, ResponseStore
from octavo.server.http.errors import HttpError
from octavo.server.http.tenants import Tenant
from octavo.serving.outputs import Delta

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
PATH = "/v1/responses"
NAMED = {"type": "function", "name": "run"}


@pytest.fixture
def api(create_service, create_test_app, byte_tokenizer):
    class Api:
        def __init__(self, *texts, **settings):
            service, self.engine = writing_service(create_service, *texts, **settings)
            self.router = routes.create_router(service)

        def app_of(self):
            return create_test_app(self.router)

        def send(self, method, path=PATH, *, tenant=None, **kwargs):
            return send(create_test_app(self.router, tenant=tenant), method, path, **kwargs)

        def post(self, input="Hello", expect=200, path=PATH, tenant=None, **body):
            response = self.send("POST", path, json={"input": input, **body}, tenant=tenant)
            assert response.status_code == expect, response.text
            if expect != 200:
                return response.json()["error"]
            if body.get("stream"):
                return events_of(response)
            if path == PATH:
                ResponseObject.model_validate(response.json())
            return response.json()

        def prompt(self, number=-1):
            return byte_tokenizer.decode(self.engine.requests[number].prompt_token_ids)

    return Api


def events_of(response):
    found = named_events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value):
    """Items without what differs from one answer to the next."""
    if isinstance(value, dict):
        changing = ("id", "item_id", "call_id", "created_at", "completed_at", "timings")
        return {key: without_ids(item) for key, item in value.items() if key not in changing}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


# -- answers -----------------------------------------------------------------------------------


def test_a_text_is_answered_by_a_message(api):
    answer = api("Good day.").post(metadata={"a": "b"}, instructions="Be kind.", model="tiny")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    (part,) = item["content"]
    assert part == {
        "type": "output_text", "annotations": [], "text": "Good day.", "logprobs": [],
    }  # fmt: skip
    assert answer["status"] == "completed" and answer["incomplete_details"] is None
    assert answer["metadata"] == {"a": "b"} and answer["instructions"] == "Be kind."
    assert answer["usage"]["output_tokens"] == len("Good day.")
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + len("Good day.")
    assert answer["timings"]["predicted_n"] == len("Good day.")
    assert answer["model"] == "tiny" and answer["id"].startswith("resp_") and answer["store"]


TEXT = f"<think>\nHm.\n</think>\n\nSo: {CALL}"
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.mark.parametrize("size", [1, 7, None])
def test_a_stream_tells_what_the_whole_answer_is(api, size):
    whole = api(TEXT).post(tools=FUNCTIONS)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    call = whole["output"][2]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    events = api(TEXT, size=size).post(tools=FUNCTIONS, stream=True)
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(EVENTS))
    if size is None:
        assert kinds == EVENTS
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    assert {event["response"]["id"] for event in (events[0], events[-1])} == {last["id"]}
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["item"]["id"] == item["id"] and mine[-1]["item"] == item
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        deltas = "".join(event["delta"] for event in mine if "delta" in event)
        text = item["content"][0]["text"] if "content" in item else item["arguments"]
        assert deltas == text
        (done,) = [e for e in mine if e["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(api, stream):
    answer = api("Once upon", reason="length").post(max_output_tokens=9, stream=stream)
    if stream:
        assert answer[-1]["type"] == "response.incomplete"
        answer = answer[-1]["response"]
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None and answer["max_output_tokens"] == 9


def test_an_empty_answer_has_a_message(api):
    (item,) = api("").post()["output"]
    assert item["content"][0]["text"] == ""


def test_thoughts_come_back_encoded_where_a_client_keeps_them(api):
    included = {"include": ["reasoning.encrypted_content"], "store": False}
    thought, message = api("<think>Hm.</think>Yes.").post(**included)["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    template = "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]"
    template += "{% endfor %}<think>"
    server = api("x", template=template)
    user = {"role": "user", "content": "Hi"}
    server.post([user, kept, {**message, "role": "assistant"}, user], **included)
    assert "[assistant|Hm.|Yes.]" in server.prompt()
    foreign = {**kept, "encrypted_content": "gAAAAABo"}
    response = server.send("POST", json={"input": [user, foreign]})
    assert response.headers.get("x-octavo-ignored") is None  # `AccessControl` adds that
    assert response.status_code == 200


def test_log_probabilities_are_those_of_the_text(api, monkeypatch, byte_tokenizer):
    h, i = byte_tokenizer.encode("Hi", add_special_tokens=False)

    async def write(self, generation):
        entries = [TokenLogprobs(h, -0.5, 1, ((h, -0.5),)), TokenLogprobs(i, -0.25, 1, ())]
        generation.push([Delta(0, "Hi", [h, i], entries, "stop")])

    monkeypatch.setattr(Writer, "write", write)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    server = api("")
    (item,) = server.post(**asked)["output"]
    found = item["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"]) for entry in found] == [("H", -0.5), ("i", -0.25)]
    assert found[0]["top_logprobs"] == [{"token": "H", "logprob": -0.5, "bytes": [72]}]
    assert server.engine.requests[0].params.logprobs == 1
    (delta,) = [e for e in server.post(**asked, stream=True) if e["type"].endswith("text.delta")]
    assert delta["logprobs"] == found
    assert server.post(expect=400, top_logprobs=1)["param"] == "top_logprobs"


def test_a_custom_tool_takes_a_text(api):
    form = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    tool = {"type": "custom", "name": "run", "description": "Runs a program.", "format": form}
    text = '<tool_call>\n{"name": "run", "arguments": {"input": "a \\"b\\""}}\n</tool_call>'
    server = api(text, size=5)
    events = server.post(tools=[tool], tool_choice={**NAMED, "type": "custom"}, stream=True)
    item = events[-1]["response"]["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", 'a "b"')
    kinds = [e["type"] for e in events if "custom" in e["type"]]
    assert kinds == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    assert "start: WORD" in server.prompt()
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    server.post([{"role": "user", "content": "Go"}, item, result], tools=[tool])
    assert '{"name": "run", "arguments": {"input": "a \\"b\\""}}' in server.prompt()


# -- input -------------------------------------------------------------------------------------


def test_items_become_messages(api):
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.name %}={{ m.name }}{% endif %}]{% endfor %}"
    )
    server = api("x", template=template)
    server.post(
        [
            {"role": "developer", "content": "Rules."},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "function_call_output", "call_id": "2",
             "output": [{"type": "input_text", "text": "s"}]},
        ],
        instructions="Be kind.",
    )  # fmt: skip
    assert server.prompt() == (
        '[system:Be kind.\n\nRules.][user:ab][assistant:c<tool_call>f{"x": 1}<tool_call>g{}]'
        "[tool:r=f][tool:s=g]"
    )


def test_instructions_are_of_one_answer_and_a_developers_message_of_all(api):
    server = api("x")
    items = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "a"}]
    answer = server.post(items, instructions="Once.")
    assert server.prompt().startswith("Once.\n\nRules.a")
    server.post("b", instructions="Twice.", previous_response_id=answer["id"])
    assert server.prompt().startswith("Twice.\n\nRules.axb")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.content.0", "a part of type input_image is not supported"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "a item of type computer_call"),
        ({"input": [{"type": "item_reference", "id": "no"}]}, "input.0.id", "no item"),
        ({"input": []}, "input", ""),
        ({"tools": [{"type": "file_search"}]}, "tools.0", "file_search is not run here"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "no"}},
         "tool_choice", "no tool has the name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"background": True, "store": False}, "background", "needs store"),
        ({"background": True, "stream": True}, "background", "needs store"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"messages": [1]}, "messages", "not a known field"),
        ({"max_output_tokens": 5000}, None, "context length"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(api, body, param, says):
    error = api("x").post(expect=400, **body)
    assert error["param"] == param and says in error["message"]


def test_tools_that_openai_runs_are_left_out_and_noted(api):
    server = api("x")
    server.post(tools=[*FUNCTIONS, {"type": "web_search", "external_web_access": False}])
    assert "web_search" not in server.prompt() and "get_weather" in server.prompt()


def test_a_format_holds_the_answer_to_a_schema(api):
    server = api("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = server.post(text={"format": asked})
    assert json.loads(server.engine.requests[0].params.structured_outputs.json) == schema
    assert answer["text"]["format"] == asked
    server.post(text={"format": {"type": "json_object"}})
    assert server.engine.requests[1].params.structured_outputs.json_object


def test_an_effort_of_none_switches_thoughts_off(api):
    server = api("x")
    assert server.post(reasoning={"effort": "none"})["reasoning"]["effort"] == "none"
    assert server.prompt().endswith("</think>\n\n")
    server.post(reasoning={"effort": "low", "summary": "auto"})
    assert not server.prompt().endswith("</think>\n\n")


def test_truncation_drops_the_oldest_turns(api):
    server = api("x")
    long = "z" * 1500
    items = [
        {"role": role, "content": f"{i}{long}"} for i in range(4) for role in ("user", "assistant")
    ]
    items.append({"role": "user", "content": "last"})
    error = server.post(items, expect=400, instructions="Rules.")
    assert error["code"] == "context_length_exceeded"
    server.post(items, instructions="Rules.", truncation="auto")
    prompt = server.prompt()
    assert prompt.startswith("Rules.3z") and "last" in prompt
    error = server.post("z" * 5000, expect=400, truncation="auto")
    assert error["code"] == "context_length_exceeded"


def test_tokens_of_the_input_are_counted(api):
    server = api("x")
    asked = {"instructions": "Be kind.", "tools": FUNCTIONS}
    counted = server.post(path=f"{PATH}/input_tokens", **asked)
    answer = server.post(**asked)
    assert counted == {
        "object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"],
    }  # fmt: skip
    assert len(server.engine.requests) == 1


# -- what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_kept_is_found_followed_and_forgotten(api, stream):
    server = api(f"Well. {CALL}")
    answer = server.post("Weather?", tools=FUNCTIONS, instructions="Once.", stream=stream)
    answer = answer[-1]["response"] if stream else answer
    path = f"{PATH}/{answer['id']}"
    assert server.send("GET", path).json() == answer
    result = {
        "type": "function_call_output",
        "call_id": answer["output"][1]["call_id"],
        "output": "sun",
    }
    following = server.post([result], previous_response_id=answer["id"], tools=FUNCTIONS)
    assert following["previous_response_id"] == answer["id"]
    prompt = server.prompt()
    assert prompt.startswith("Weather?Well.<tool_call>") and "Once" not in prompt
    assert "</tool_call>sun" in prompt
    server.post("And now?", previous_response_id=following["id"])
    assert server.prompt().startswith("Weather?") and "And now?" in server.prompt()
    assert server.send("POST", f"{path}/cancel").status_code == 400
    assert server.send("DELETE", path).json()["deleted"]
    assert server.send("GET", path).status_code == 404
    assert server.post("x", expect=404, previous_response_id=answer["id"])
    # What followed it has all that it needs.
    server.post("x", previous_response_id=following["id"])


def test_items_are_listed_in_pages(api):
    server = api("x")
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    answer = server.post(items)
    path = f"{PATH}/{answer['id']}/input_items"
    page = server.send("GET", path, params={"limit": 2, "order": "asc"}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"] and page["has_more"]
    rest = {"after": page["last_id"], "order": "asc"}
    page = server.send("GET", path, params=rest).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "3", "4"]
    assert not page["has_more"]
    newest = server.send("GET", path, params={"limit": 1}).json()
    assert newest["data"][0]["content"][0]["text"] == "4"
    for wrong in ({"after": "no"}, {"order": "up"}, {"limit": 0}, {"limit": "x"}):
        refused = server.send("GET", path, params=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in wrong


def test_references_stand_for_items_of_answers(api):
    server = api(CALL)
    answer = server.post("Weather?", tools=FUNCTIONS)
    (call,) = answer["output"]
    user = {"role": "user", "content": "Weather?"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    server.post([user, {"type": "item_reference", "id": call["id"]}, result], tools=FUNCTIONS)
    assert "get_weather" in server.prompt() and "</tool_call>sun" in server.prompt()


def test_nothing_is_kept_that_should_not_be(api):
    server = api("x")
    for body in ({"store": False}, {"store": False, "stream": True}):
        answer = server.post(**body)
        answer = answer[-1]["response"] if "stream" in body else answer
        assert answer["store"] is False
        assert server.send("GET", f"{PATH}/{answer['id']}").status_code == 404
    server = api("x", response_store=0)
    assert server.post()["store"] is False


def test_no_key_sees_the_answers_of_another(api):
    server = api("x")
    one, other = Tenant("one"), Tenant("other")
    answer = server.post("Hi", tenant=one)
    path = f"{PATH}/{answer['id']}"
    assert server.send("GET", path, tenant=one).status_code == 200
    for method, place in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        assert server.send(method, place, tenant=other).status_code == 404
    assert server.post(expect=404, tenant=other, previous_response_id=answer["id"])
    reference = [{"type": "item_reference", "id": answer["output"][0]["id"]}]
    assert server.post(reference, expect=400, tenant=other)["param"] == "input.0.id"


def kept(name, num_bytes=100, owner="me"):
    return KeptResponse(name, owner, b"x" * num_bytes, b"[]", b"[]", [f"item of {name}"])


def test_a_store_is_bounded_in_bytes_and_in_time():
    now = [0.0]
    store = ResponseStore(3 * kept("a").num_bytes, clock=lambda: now[0])
    for name in "abc":
        store.keep(kept(name))
    store.find("a", "me")
    store.keep(kept("d"))
    assert store.find("a", "me").id == "a"
    with pytest.raises(HttpError):
        store.find("b", "me")
    assert store.of_item("item of b", "me") is None and store.of_item("item of d", "me")
    store.keep(kept("huge", 10_000))
    assert store.num_bytes == 3 * kept("a").num_bytes
    now[0] = 3000.0
    store.find("c", "me")
    now[0] = 4000.0
    assert store.find("c", "me")
    with pytest.raises(HttpError):
        store.find("a", "me")
    store.forget("c", "me")
    assert store.num_bytes == 0


# -- in the background -------------------------------------------------------------------------


def in_one_loop(api, steps):
    """Send several requests while the engine goes on."""
    app = api.app_of()

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await steps(client)

    return asyncio.run(run())


async def made(client, path):
    """The answer when it is over."""
    while (answer := (await client.get(path)).json())["status"] == "in_progress":
        await asyncio.sleep(0.001)
    return answer


def test_an_answer_is_made_in_the_background(api):
    async def steps(client):
        begun = (await client.post(PATH, json={"input": "Hi", "background": True})).json()
        assert begun["status"] == "in_progress" and begun["background"] and not begun["output"]
        path = f"{PATH}/{begun['id']}"
        answer = await made(client, path)
        cancelled = await client.post(f"{path}/cancel")
        following = {"input": "And?", "previous_response_id": begun["id"]}
        return answer, cancelled.status_code, (await client.post(PATH, json=following)).json()

    server = api("Good day.", size=1)
    answer, cancelled, following = in_one_loop(server, steps)
    ResponseObject.model_validate(answer)
    assert answer["status"] == "completed" and cancelled == 400
    assert answer["output"][0]["content"][0]["text"] == "Good day."
    assert following["status"] == "completed" and "Good day." in server.prompt()


def test_an_answer_in_the_background_is_cancelled(api, monkeypatch):
    async def write(self, generation):
        generation.push([Delta(0, "Hi", [72, 105])])
        await asyncio.sleep(60)

    monkeypatch.setattr(Writer, "write", write)
    server = api("")

    async def steps(client):
        ids = []
        for _ in range(2):
            begun = (await client.post(PATH, json={"input": "Hi", "background": True})).json()
            ids.append(f"{PATH}/{begun['id']}")
        early = {"input": "x", "previous_response_id": begun["id"]}
        assert (await client.post(PATH, json=early)).status_code == 400
        await asyncio.sleep(0.01)
        cancelled = (await client.post(f"{ids[0]}/cancel")).json()
        assert (await client.get(ids[0])).json() == cancelled
        assert (await client.delete(ids[1])).json()["deleted"]
        assert (await client.get(ids[1])).status_code == 404
        server.engine.task.cancel()
        return cancelled

    cancelled = in_one_loop(server, steps)
    ResponseObject.model_validate(cancelled)
    assert cancelled["status"] == "cancelled"
    assert all(generation.is_over for generation in server.engine.generations)


def test_a_failure_in_the_background_is_told(api, monkeypatch):
    async def write(self, generation):
        await asyncio.sleep(0)
        generation.fail(RuntimeError("asked for"))

    monkeypatch.setattr(Writer, "write", write)

    async def steps(client):
        begun = (await client.post(PATH, json={"input": "Hi", "background": True})).json()
        return await made(client, f"{PATH}/{begun['id']}")

    answer = in_one_loop(api(""), steps)
    assert answer["status"] == "failed" and answer["error"]["code"] == "server_error"


# -- failures ----------------------------------------------------------------------------------


def test_a_failure_within_a_stream_is_an_event(api, monkeypatch):
    async def write(self, generation):
        generation.push([Delta(0, "Hi", [72, 105])])
        await asyncio.sleep(0.01)
        generation.fail(RuntimeError("asked for"))

    monkeypatch.setattr(Writer, "write", write)
    events = api("").post(stream=True)
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "internal error"}
