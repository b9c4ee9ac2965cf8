"""Completions: several prompts, echo, the best of several, and log-probabilities with offsets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math

import httpx
import pytest

from octavo.base.errors import QueueFullError
from octavo.core.batch import TokenLogprobs
from octavo.core.limits import QueueLimits
from octavo.server.api.answers import Model, ModelList
from octavo.server.api.openai import completions
from octavo.server.api.openai import models as openai_models
from octavo.server.api.openai.completion_body import Completion, CompletionChunk
from octavo.server.api.openai.logprobs import CompletionLogprobs, TokenNames
from octavo.server.http.tenants import Tenant, TokenBucket

URL = "/v1/completions"


class Api:
    """Posts to the completions route. Every answer is checked against both schemas."""

    def __init__(self, engine, create_service, create_test_app):
        self.engine = engine
        service = create_service(engine)
        self.app = create_test_app(
            completions.create_router(service), openai_models.create_router(service)
        )

    def request(self, method, url, **options):
        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, url, **options)

        return asyncio.run(send())

    def post(self, expect=200, prompt="abc", **body):
        response = self.request("POST", URL, json={"prompt": prompt, **body})
        assert response.status_code == expect, response.text
        if expect != 200:
            return response.json()["error"]
        if body.get("stream"):
            return self.parse_stream(response.text)
        Completion.model_validate(response.json())
        from openai import types  # takes long to import, and few processes come here

        types.Completion.model_validate(_as_openai(response.json()))
        return response.json()

    @staticmethod
    def parse_stream(text):
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(one.removeprefix("data: ")) for one in events]
        for chunk in chunks:
            CompletionChunk.model_validate(chunk)
        return chunks


def _as_openai(answer):
    """OpenAI's API answers null for the first token of a prompt, its schema forbids it."""
    copy = json.loads(json.dumps(answer))
    for choice in copy["choices"]:
        for name, value in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if choice["logprobs"] and choice["logprobs"][name][:1] == [None]:
                choice["logprobs"][name][0] = value
    return copy


@pytest.fixture
def api(fake_engine, create_service, create_test_app):
    return Api(fake_engine, create_service, create_test_app)


def joined(chunks, index, field="text"):
    parts = [c[field] for k in chunks for c in k["choices"] if c["index"] == index]
    return "".join(parts)


def test_who_sees_a_window_may_ask_for_more_than_the_context(api, fake_engine):
    assert api.post(max_tokens=300, window=64)["usage"]["completion_tokens"] == 300
    (request,) = fake_engine.requests
    assert (request.params.window, request.params.attention_sinks) == (64, None)
    assert api.post(400, max_tokens=300)["code"] == "context_length_exceeded"
    assert api.post(400, max_tokens=300, window=0)["code"] == "context_length_exceeded"
    assert api.post(400, max_tokens=3, window=1000)["param"] == "window"


def test_why_no_more_of_a_prompt_was_cached_is_told_but_not_what_others_asked(api, fake_engine):
    def told(reason):
        fake_engine.miss_reason = reason
        return api.post(max_tokens=2)["usage"]["prompt_tokens_details"].get("miss_reason")

    assert (told(""), told("evicted"), told("other_salt")) == (None, "evicted", "never_seen")


def test_the_whole_shape(api):
    answer = api.post(max_tokens=2)
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint") and answer.pop("timings")["predicted_n"] == 2
    assert answer == {
        "id": "cmpl-req-1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "cb",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_sixteen_tokens_by_default(api):
    assert api.post()["usage"]["completion_tokens"] == 16
    assert api.post(max_tokens=None)["usage"]["completion_tokens"] == 16


def test_prompts_of_all_kinds(api, byte_tokenizer):
    ids = byte_tokenizer.encode("abc", add_special_tokens=False)
    for prompt in ("abc", ["abc"], ids, [ids]):
        assert api.post(prompt=prompt, max_tokens=2)["choices"][0]["text"] == "cb"
    answer = api.post(prompt=["ab", ids, "z"], max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ba", "cb", "zz"]
    assert answer["usage"]["prompt_tokens"] == 6
    assert "timings" not in answer  # of several prompts, whose times overlap


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_by_prompt(api, stream):
    api.engine.answer = lambda request, index: [
        request.prompt_token_ids[0] + index,
        *[256] * (index + 1),
    ]
    answer = api.post(prompt=["a", "p"], n=3, max_tokens=9, stream=stream)
    if stream:
        texts = [joined(answer, index) for index in range(6)]
        reasons = [c["finish_reason"] for k in answer for c in k["choices"] if c["finish_reason"]]
        assert reasons == ["stop"] * 6
    else:
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["a", "b", "c", "p", "q", "r"]


@pytest.mark.parametrize("stream", [False, True])
def test_all_prompts_or_none(api, stream):
    submit, count = api.engine.submit, []

    def submit_two(request):
        count.append(request)
        if len(count) == 3:
            raise QueueFullError("full", 1.0)
        return submit(request)

    api.engine.submit = submit_two
    assert api.post(503, prompt=["a", "b", "c", "d"], stream=stream)["type"] == "overloaded_error"
    assert len(count) == 3
    assert api.engine.aborted == [request.request_id for request in count[:2]]
    bad = api.post(400, prompt=["a", "x" * 300, "c"], stream=stream)
    assert bad["code"] == "context_length_exceeded" and len(count) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a"] * 5}, "lower n or fewer prompts"),
        ({"prompt": "a", "n": 5}, "lower n or fewer prompts"),
        ({"prompt": ["a" * 20, "b" * 21]}, "shorten the prompts"),
        ({"prompt": "a" * 21, "n": 2}, "shorten the prompts"),
        ({"prompt": "a", "max_tokens": 40}, "lower max_tokens"),
        ({"prompt": "a", "max_tokens": 20, "n": 2}, "lower max_tokens or n"),
    ],
)
def test_what_no_waiting_can_make_possible_is_not_to_be_tried_again(api, body, words):
    api.engine.limits = QueueLimits(4, 40)
    assert words in api.post(400, **body)["message"]
    assert not api.engine.requests


def test_what_was_charged_for_none_is_given_back(fake_engine, create_service, create_test_app):
    tenant = Tenant("limited", tokens=TokenBucket(60, lambda: 0.0))

    def create_app(*routers):
        return create_test_app(*routers, tenant=tenant)

    api = Api(fake_engine, create_service, create_app)
    submit = fake_engine.submit

    def submit_first(request):
        if fake_engine.requests:
            raise QueueFullError("full", 1.0)
        return submit(request)

    fake_engine.submit = submit_first
    api.post(503, prompt=["a" * 20, "b" * 20], max_tokens=10)
    tenant.charge_tokens(60)


def test_log_probabilities_of_prompts_are_bounded_together(api):
    each = {"prompt_logprobs": 20, "max_tokens": 1}
    api.post(prompt="a" * 255, **each)
    error = api.post(400, prompt=["a" * 255] * 50, **each)
    assert error["param"] == "prompt_logprobs" and "ask for fewer" in error["message"]
    error = api.post(400, prompt=["a" * 255] * 50, echo=True, logprobs=20, max_tokens=1)
    assert error["param"] == "prompt_logprobs"


def test_allowed_tokens_are_bounded_by_the_number_of_prompts(api):
    allowed = [65] * 5000
    api.post(prompt=["a"] * 2, allowed_token_ids=allowed, max_tokens=1)
    error = api.post(400, prompt=["a"] * 256, allowed_token_ids=allowed)
    assert error["param"] == "allowed_token_ids" and "at most 4096" in error["message"]


def test_many_prompts_are_queued_in_turns(api):
    """Each of their tokens is looked at, and the event loop has others to serve."""
    turn, turns = 0, []
    submit = api.engine.submit

    def submit_in_turn(request):
        turns.append(turn)
        return submit(request)

    async def count_turns():
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def send():
        counting = asyncio.ensure_future(count_turns())
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": ["a" * 250] * 200, "max_tokens": 1}
            response = await client.post(URL, json=body)
        counting.cancel()
        return response

    api.engine.submit = submit_in_turn
    assert asyncio.run(send()).status_code == 200
    assert len(turns) == 200 and len(set(turns)) > 4


def test_a_stream_begins_with_much_that_is_written_in_the_background(api, monkeypatch):
    asked = {"prompt": ["abc", "x"], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 1}
    small = api.post(**asked, stream=True, seed=1)
    called = []

    async def in_background(function, *args):
        called.append(function.__name__)
        return function(*args)

    monkeypatch.setattr("octavo.server.api.generation_job.MANY_ENTRIES", 1)
    monkeypatch.setattr("octavo.server.api.generation_job.in_background", in_background)
    large = api.post(**asked, stream=True, seed=1)
    assert [chunk["choices"] for chunk in large] == [chunk["choices"] for chunk in small]
    assert called == ["first_events"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_ends_the_others(api, stream):
    api.engine.delay = 0.002
    run = api.engine._run

    async def fail_second(generation):
        if len(api.engine.generations) == 2 and generation is api.engine.generations[1]:
            await asyncio.sleep(0.01)
            generation.fail(QueueFullError("gone"))
        else:
            await run(generation)

    api.engine._run = fail_second
    response = api.request(
        "POST", URL, json={"prompt": ["a", "b"], "max_tokens": 100, "stream": stream}
    )
    if stream:
        assert response.status_code == 200
        error, done, _ = response.text.split("\n\n")[-3:]
        assert "gone" in error and done == "data: [DONE]"
    else:
        assert response.status_code == 503
    first, second = api.engine.generations
    assert first.is_over
    assert stream == (api.engine.aborted == [first.request.request_id])


def test_the_best_of_several(api):
    answer = api.post(n=2, best_of=4, max_tokens=3)
    # The engine's likelihoods fall with the number of the sample.
    assert api.engine.requests[0].params.num_samples == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12
    api.engine.answer = lambda request, index: [64 + index] * (4 - index)
    answer = api.post(n=2, best_of=4, max_tokens=9)  # likelihoods: -2, -2.5, -3, -3.5
    assert [choice["text"] for choice in answer["choices"]] == ["aaaa", "bbb"]
    api.engine.answer = lambda request, index: [64 + index] * (16 if index < 2 else 1)
    answer = api.post(n=2, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == ["c", "d"]
    assert api.post(400, n=1, best_of=2, stream=True)["param"] == "best_of"
    assert api.post(400, n=3, best_of=2)["param"] == "best_of"
    api.post(n=2, best_of=2, stream=True, max_tokens=1)


# -- echo --------------------------------------------------------------------------------------


def test_echo(api):
    assert api.post(echo=True, max_tokens=2)["choices"][0]["text"] == "abccb"
    chunks = api.post(prompt=["abc", "x"], echo=True, max_tokens=2, stream=True, n=2)
    assert [joined(chunks, index) for index in range(4)] == ["abccb", "abccb", "xxx", "xxx"]
    ids = [*api.engine.requests[0].prompt_token_ids, 256]
    assert api.post(prompt=ids, echo=True, max_tokens=2)["choices"][0]["text"] == "abcc"
    shown = api.post(prompt=ids, echo=True, max_tokens=1, skip_special_tokens=False)
    assert shown["choices"][0]["text"].startswith("abc<eos>")
    cut = api.post(echo=True, max_tokens=1, truncate_prompt_tokens=2)
    assert cut["choices"][0]["text"] == "bcc"


def test_scoring_a_prompt(api):
    """As lm-eval asks for it: echo with log-probabilities, with no token or with one."""
    for max_tokens in (0, 1):
        answer = api.post(echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == "abc" + "c" * max_tokens
        assert logprobs["tokens"] == ["a", "b", "c", *["c"] * max_tokens]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, *[-0.5] * max_tokens]
        assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1] == {"b": -0.5}
        assert logprobs["text_offset"] == [0, 1, 2, *[3] * max_tokens]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert api.engine.requests[-1].params.max_tokens == 1
    stream = api.post(echo=True, logprobs=1, max_tokens=0, stream=True)
    assert joined(stream, 0) == "abc"
    assert stream[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert stream[-1]["choices"][0]["finish_reason"] == "length"
    assert api.post(400, max_tokens=0)["param"] == "max_tokens"


# -- log-probabilities -------------------------------------------------------------------------


def test_logprobs_in_a_stream_and_whole(api):
    options = {"prompt": "día", "max_tokens": 12, "logprobs": 2, "n": 2, "return_token_ids": True}
    for echo in (False, True):
        whole = api.post(**options, echo=echo)
        chunks = api.post(**options, echo=echo, stream=True)
        for choice in whole["choices"]:
            parts = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                together = [one for p in parts if p["logprobs"] for one in p["logprobs"][field]]
                assert together == choice["logprobs"][field]
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert len(choice["logprobs"]["tokens"]) == 12 + 4 * echo


def test_logprobs_that_are_infinite(byte_tokenizer):
    writer = CompletionLogprobs(byte_tokenizer, TokenNames(byte_tokenizer))
    entry = TokenLogprobs(64, -math.inf, 9, ((65, math.nan), (66, -1.0)))
    written = writer.next([64], [entry])
    assert written["token_logprobs"] == [-9999.0]
    assert written["top_logprobs"] == [{"b": -9999.0, "c": -1.0, "a": -9999.0}]
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_offsets_count_characters_of_the_text(byte_tokenizer):
    text = "aé😀z"
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    with_special = [ids[0], 256, *ids[1:]]
    writer = CompletionLogprobs(byte_tokenizer, TokenNames(byte_tokenizer))
    entries = [None] * len(with_special)
    written = writer.next(with_special, entries)
    #                                a eos é é 😀 (of four bytes) z
    assert written["text_offset"] == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert written["tokens"] == ["a", "<eos>"] + [
        f"bytes:\\x{byte:02x}" for byte in "é😀".encode()
    ] + ["z"]
    shown = CompletionLogprobs(
        byte_tokenizer, TokenNames(byte_tokenizer, as_ids=True), skip_special_tokens=False
    )
    written = shown.next(with_special[:3], entries[:3])
    assert written["text_offset"] == [0, 1, 6]
    assert written["tokens"] == [f"token_id:{i}" for i in with_special[:3]]


def test_offsets_after_a_prompt_that_is_not_echoed(byte_tokenizer):
    e, accent = byte_tokenizer.encode("é", add_special_tokens=False)
    writer = CompletionLogprobs(byte_tokenizer, TokenNames(byte_tokenizer), before=[64, e])
    # The first byte of the character was the prompt's; the completion has the whole of it.
    assert writer.next([accent, 65], [None, None])["text_offset"] == [0, 1]


def test_logprobs_of_prompts(api):
    answer = api.post(prompt=["ab", "xyz"], prompt_logprobs=0, max_tokens=1)
    lengths = [len(choice["prompt_logprobs"]) for choice in answer["choices"]]
    assert lengths == [2, 3]
    assert answer["choices"][0]["prompt_logprobs"][0] is None
    assert api.post(400, prompt_logprobs=0, stream=True)["param"] == "prompt_logprobs"


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, 260]}, "prompt"),
        ({"prompt": "abc", "truncate_prompt_tokens": 0}, "prompt"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_refused_at_the_door(api, body, param):
    assert api.post(400, **body)["param"] == param
    assert api.engine.requests == []


def test_the_samples_of_all_prompts_are_bounded(api):
    error = api.post(400, prompt=["a"] * 200, n=8)
    assert error["param"] == "n" and "1600" in error["message"] and "1024" in error["message"]
    assert not api.engine.requests


def test_unknown_models(api):
    assert api.post(404, model="text-davinci-003")["code"] == "model_not_found"
    assert api.post(model="also-tiny", max_tokens=1)["model"] == "also-tiny"


def test_special_tokens_of_the_prompt(api, byte_tokenizer):
    api.post(prompt="<eos>", max_tokens=1)
    assert len(api.engine.requests[0].prompt_token_ids) == 5  # it is text, as any other


def test_many_prompts_let_others_have_their_turn(api):
    async def test():
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": ["a" * 250] * 256, "max_tokens": 1}
            answering = asyncio.ensure_future(client.post(URL, json=body))
            turns = 0
            while not answering.done():
                await asyncio.sleep(0)
                turns += 1
            assert len((await answering).json()["choices"]) == 256
            return turns

    assert asyncio.run(test()) > 256


# -- models ------------------------------------------------------------------------------------


def test_models(api):
    listed = api.request("GET", "/v1/models").json()
    ModelList.model_validate(listed)
    assert [model["id"] for model in listed["data"]] == ["tiny", "also-tiny"]
    assert listed["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "octavo",
        "root": "tiny",
        "parent": None,
        "max_model_len": 256,
        "sampling_defaults": {},
        "permission": [],
    }
    one = api.request("GET", "/v1/models/also-tiny").json()
    Model.model_validate(one)
    assert one == listed["data"][1]


def test_names_of_models_may_have_slashes(api, create_service, create_test_app, byte_tokenizer):
    service = dataclasses.replace(create_service(api.engine), model_names=("org/name:q4",))
    api.app = create_test_app(openai_models.create_router(service))
    assert api.request("GET", "/v1/models/org/name:q4").json()["id"] == "org/name:q4"
    for unknown in ("org", "org/name", "tiny"):
        response = api.request("GET", f"/v1/models/{unknown}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_the_route_is_described(api):
    operation = api.app.openapi()["paths"][URL]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/CompletionRequest"
    )
    assert "422" not in operation["responses"]
