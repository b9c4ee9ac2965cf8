from __future__ import annotations

import asyncio
import json

import pytest

from octavo.base.errors import DeadlineError, EngineUnavailableError, QueueFullError
from octavo.server.api.octavo.generate import create_router
from octavo.server.engine.response_cache import ResponseCache
from octavo.server.http.tenants import RateLimitError, Tenant, TokenBucket


@pytest.fixture
def service(fake_engine, create_service):
    return create_service(fake_engine)


@pytest.fixture
def ask(service, send):
    """Sends one request to the routes of ``service``, as the given tenant."""

    def ask(method, path, *, tenant=None, served=service, **kwargs):
        return send(create_router(served), method, path, tenant=tenant, **kwargs)

    return ask


@pytest.fixture
def generate(ask):
    return lambda **body: ask("POST", "/generate", json=body)


def events_of(response):
    """The JSON values of a stream; its end must be as promised."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_prompt_is_continued(generate, fake_engine):
    response = generate(prompt="abc", max_tokens=5, temperature=0)
    assert response.status_code == 200
    answer = response.json()
    assert answer["timings"].pop("predicted_n") == 5
    del answer["timings"]
    assert answer == {
        "request_id": "req-1",
        "text": "cbacb",  # the fake engine's answer
        "tokens_generated": 5,
        "finish_reason": "length",
        "prompt_tokens": 3,
    }
    request = fake_engine.requests[0]
    assert request.params.temperature == 0
    assert request.params.max_tokens == 5
    assert request.is_deterministic and not request.streams
    assert (request.route, request.external_id, request.tenant) == ("/generate", "req-1", "test")


def test_token_ids_are_a_prompt_too(generate, byte_tokenizer):
    ids = byte_tokenizer.encode("xyz")
    assert generate(prompt=ids, max_tokens=2).json()["text"] == "zy"


def test_what_is_not_given_has_a_default(generate, fake_engine):
    answer = generate(prompt="abc").json()
    assert answer["tokens_generated"] == 16
    params = fake_engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.seed is not None  # drawn, so that it could be run again
    assert not fake_engine.requests[0].is_deterministic


def test_null_is_not_given(generate, fake_engine):
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream")
    answer = generate(prompt="abc", timeout=None, **dict.fromkeys(names)).json()
    assert answer["tokens_generated"] == 16


def test_fields_reach_the_engine(generate, fake_engine):
    generate(
        prompt="a", max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop="x", timeout=9
    )
    request = fake_engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 11)
    assert params.stop == ("x",)
    assert request.deadline == pytest.approx(request.arrival_time + 9)
    assert request.is_deterministic


def test_a_stream_brings_what_the_whole_answer_has(generate):
    whole = generate(prompt="hé", max_tokens=7, temperature=0).json()
    *events, last = events_of(generate(prompt="hé", max_tokens=7, temperature=0, stream=True))
    assert "".join(event["text"] for event in (*events, last)) == whole["text"]
    assert [event["tokens_generated"] for event in (*events, last)] == list(range(1, 8))
    assert all(event["finish_reason"] is None for event in events)
    assert set(events[0]) == {"text", "tokens_generated", "finish_reason"}
    assert last["finish_reason"] == whole["finish_reason"]
    assert (last["prompt_tokens"], last["request_id"]) == (3, "req-1")
    assert set(last["timings"]) == set(whole["timings"])


def test_the_context_bounds_the_answer(generate, fake_engine):
    assert generate(prompt="a" * 250).json()["tokens_generated"] == 6
    assert generate(prompt="a" * 240, max_tokens=-1).json()["tokens_generated"] == 16
    response = generate(prompt="a" * 250, max_tokens=7)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert generate(prompt="a" * 256).status_code == 400
    assert generate(prompt="a" * 100_000).status_code == 400
    assert len(fake_engine.requests) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", [-1]),
        ("prompt", [2**31]),
        ("prompt", [1.0]),
        ("prompt", [True]),
        ("prompt", ["a"]),
        ("prompt", {"text": "a"}),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("max_tokens", "1"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 1e308),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**31),
        ("seed", 2**64),
        ("stop", 1),
        ("stop", ["x"] * 17),
        ("stop", "x" * 5000),
        ("stream", 1),
        ("timeout", 0),
        ("timeout", 1e9),
        ("n", 2),
        ("logprobs", 1),
        ("parameters", {"top_k": 3}),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(generate, fake_engine, field, value):
    response = generate(**{"prompt": "abc", field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert fake_engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": -1, "seed": -1},
        {"prompt": "a", "max_tokens": 255, "temperature": 2, "top_k": 2**31 - 1, "seed": 2**64 - 1},
        {"prompt": "a", "temperature": -0.0, "top_p": 1e-300, "stop": [], "timeout": 86400},
    ],
)
def test_the_bounds_themselves_are_accepted(generate, body):
    assert generate(**body).status_code == 200


def test_an_unknown_model_is_not_found(generate):
    response = generate(prompt="a", model="huge")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert generate(prompt="a", model="also-tiny").status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "inputs": "a"}, {"max_tokens": 3}])
def test_a_body_is_octavos_or_tgis(generate, body):
    response = generate(**body)
    assert response.status_code == 400
    assert "either prompt, or TGI's inputs" in response.text


def test_tgis_words_get_tgis_answer(generate):
    answer = generate(inputs="abc", parameters={"max_new_tokens": 4}).json()
    assert answer == {"generated_text": "cbac"}
    response = generate(inputs="abc", parameters={"max_new_tokens": 4}, stream=True)
    assert response.text.count("data: ") == 4
    wrong = generate(inputs="abc", parameters={"max_new_tokens": 0}).json()
    assert wrong["error_type"] == "validation"
    assert wrong["param"] == "parameters.max_new_tokens"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("full", 2.5), 503),
        (EngineUnavailableError("stopping"), 503),
        (RuntimeError("secret /path"), 500),
    ],
)
def test_what_the_engine_refuses(generate, fake_engine, error, status):
    fake_engine.submit_error = error
    for stream in (False, True):
        response = generate(prompt="a", stream=stream)
        assert response.status_code == status
        assert ("retry-after" in response.headers) == (status == 503)
        assert "secret" not in response.text
        assert response.json()["error"]["message"]


def test_a_failure_is_a_status_or_an_event(generate, fake_engine):
    fake_engine.error_after, fake_engine.error = 0, DeadlineError("too late")
    assert generate(prompt="a").status_code == 504
    assert generate(prompt="a", stream=True).status_code == 504
    fake_engine.error_after = 2
    first, second, error = events_of(generate(prompt="a", stream=True))
    assert (first["tokens_generated"], second["tokens_generated"]) == (1, 2)
    assert error["error"]["code"] == "timeout"


def test_a_sample_that_could_not_be_computed_is_an_error(generate, fake_engine, monkeypatch):
    submit = fake_engine.submit

    def submit_broken(request):
        generation = submit(request)
        push = generation.push

        def push_broken(deltas):
            deltas[-1].finish_reason, deltas[-1].error = "error", "NaN"
            push(deltas)

        generation.push = push_broken
        return generation

    monkeypatch.setattr(fake_engine, "submit", submit_broken)
    assert generate(prompt="a").status_code == 500
    assert generate(prompt="a", stream=True).status_code == 500


def test_a_tenant_pays_for_what_it_gets(ask):
    bucket = TokenBucket(100, clock=lambda: 0.0)
    tenant = Tenant("key-1", "salt", tokens=bucket)
    body = {"prompt": "abc", "max_tokens": 40}
    assert ask("POST", "/generate", tenant=tenant, json=body).status_code == 200
    assert bucket.take(57) == 0.0  # 100 - 3 - 40
    response = ask("POST", "/generate", tenant=tenant, json=body)
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "true"
    with pytest.raises(RateLimitError):
        tenant.charge_tokens(1)


def test_what_was_not_used_is_given_back(ask, fake_engine):
    bucket = TokenBucket(100, clock=lambda: 0.0)
    tenant = Tenant("key-1", "salt", tokens=bucket)
    fake_engine.answer = lambda request, index: [1, 2]
    for stream in (False, True):
        body = {"prompt": "abc", "max_tokens": 60, "stream": stream}
        assert ask("POST", "/generate", tenant=tenant, json=body).status_code == 200
    assert bucket.take(90.5) > 0
    assert bucket.take(90) == 0.0
    assert {request.cache_salt for request in fake_engine.requests} == {"salt"}


def test_an_answer_from_the_cache_is_marked(ask, fake_engine, create_service):
    served = create_service(fake_engine, cache=ResponseCache(fake_engine, 1 << 20))
    body = {"prompt": "abc", "temperature": 0}
    first = ask("POST", "/generate", served=served, json=body)
    again = ask("POST", "/generate", served=served, json=body)
    assert "x-octavo-cache" not in first.headers and "cached" not in first.json()
    assert again.headers["x-octavo-cache"] == "hit" and again.json()["cached"] is True
    assert again.json()["text"] == first.json()["text"]
    stream = ask("POST", "/generate", served=served, json={**body, "stream": True})
    assert stream.headers["x-octavo-cache"] == "hit"
    events = events_of(stream)
    assert len(events) == 16 and events[-1]["cached"] is True
    assert "".join(event["text"] for event in events) == first.json()["text"]
    assert len(fake_engine.requests) == 1


def test_leaving_a_stream_ends_its_generation(service, fake_engine, create_test_app):
    fake_engine.delay = 0.005
    app = create_test_app(create_router(service))
    body = json.dumps({"prompt": "abc", "max_tokens": 200, "stream": True}).encode()

    async def leave_early():
        received = []
        has_data = asyncio.Event()
        requests = [{"type": "http.request", "body": body}]

        async def receive():
            if requests:
                return requests.pop()
            await has_data.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            received.append(message)
            if message.get("body"):
                has_data.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, receive, send)
        return received

    asyncio.run(leave_early())
    assert len(fake_engine.aborted) == 1
    assert fake_engine.generations[0].stats.num_output_tokens < 10


def test_openapi_describes_both_kinds_of_words(service, create_test_app):
    document = create_test_app(create_router(service)).openapi()
    schemas = document["components"]["schemas"]
    assert len(schemas["GenerateBody"]["oneOf"]) == 2
    operation = document["paths"]["/generate"]["post"]
    content = operation["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    assert {"GenerateResponse", "TgiResponse"} <= set(schemas)
