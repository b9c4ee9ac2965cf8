from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import uvicorn
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from octavo import __version__
from octavo.base.errors import DeadlineError, QueueFullError
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.server.api.tgi import routes as tgi
from octavo.server.api.tgi.protocol import TgiParameters
from octavo.server.api.tgi.routes import to_sampling_params
from octavo.server.engine.generation import Generation
from octavo.server.engine.response_cache import ResponseCache
from octavo.serving.outputs import Delta
from octavo.text.detokenizer import IncrementalDetokenizer

EOS = 256


@pytest.fixture
def ask(fake_engine, create_service, send):
    """Sends one request to TGI's routes."""
    service = create_service(fake_engine)

    def ask(method, path, served=service, **kwargs):
        return send(tgi.create_router(served), method, path, **kwargs)

    return ask


@pytest.fixture
def post(ask):
    """Posts a prompt with parameters."""

    def post(path, inputs, *, stream=None, **parameters):
        body = {"inputs": inputs, "parameters": parameters}
        if stream is not None:
            body["stream"] = stream
        return ask("POST", path, json=body)

    return post


def events_of(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.text.split("\n\n")
    assert rest == ""  # no [DONE]: TGI's clients would take it for an answer
    return [json.loads(event.removeprefix("data: ")) for event in events]


def params_of(**parameters) -> SamplingParams:
    asked = TgiParameters.model_validate(parameters)
    return to_sampling_params(asked, max_tokens=9, with_logprobs=False)


# -- parameters -----------------------------------------------------------------------------------


def test_greedy_is_the_default():
    params = params_of()
    assert (params.temperature, params.top_k, params.top_p, params.n) == (0.0, 0, 1.0, 1)
    assert params.logprobs is None and params.prompt_logprobs is None
    assert params.seed is not None


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": False}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.0, "do_sample": True}, 0.0),
        ({"temperature": 0}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"seed": 3}, 0.0),
    ],
)
def test_any_field_that_shapes_the_distribution_means_sampling(parameters, temperature):
    assert params_of(**parameters).temperature == temperature


def test_every_parameter_reaches_the_sampler():
    params = params_of(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        typical_p=0.8,
        seed=2**64 - 1,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        stop=["a", "b"],
        best_of=3,
        details=True,
        decoder_input_details=True,
        top_n_tokens=4,
    )
    assert params == SamplingParams(
        n=3,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        typical_p=0.8,
        seed=2**64 - 1,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        stop=("a", "b"),
        include_stop_str_in_output=True,
        max_tokens=9,
        logprobs=4,
        prompt_logprobs=0,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**31),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", -1),
        ("temperature", 101),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0),
        ("frequency_penalty", 2.1),
        ("stop", "x"),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 3000] * 2),
        ("best_of", 0),
        ("best_of", 129),
        ("best_of", 2),  # greedy
        ("truncate", 0),
        ("top_n_tokens", 21),
        ("do_sample", 1),
        ("watermark", True),
        ("grammar", {"type": "regex"}),
        ("grammar", {"type": "regex", "value": {}}),
        ("grammar", {"type": "choice", "value": ["a"]}),
        ("grammar", {"type": "json_schema", "value": {"name": "x"}}),
        ("adapter_id", "mine"),
        ("max_tokens", 5),
    ],
)
@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_a_wrong_value_is_refused_by_name_in_both_forms(post, fake_engine, path, field, value):
    response = post(path, "abc", **{field: value})
    assert response.status_code == 400, response.text
    error = response.json()
    assert set(error) == {"error", "error_type", "type", "param", "code"}
    assert error["error_type"] == "validation" and error["type"] == "invalid_request_error"
    assert error["param"].split(".")[:2] == ["parameters", field]
    assert field in error["error"]
    assert fake_engine.requests == []


@pytest.mark.parametrize("body", [{}, {"inputs": ""}, {"inputs": None}, {"inputs": ["a"]}, []])
def test_a_wrong_body_is_refused(ask, body):
    for path in ("/", "/generate_stream"):
        response = ask("POST", path, json=body)
        assert response.status_code == 400
        assert isinstance(response.json()["error"], str)
    assert isinstance(ask("POST", "/", content=b"{").json()["error"], str)


def test_values_that_ask_for_nothing_are_accepted(post):
    nothing = dict.fromkeys(TgiParameters.model_fields)
    nothing |= {"watermark": False, "details": False, "best_of": 1, "top_n_tokens": 0, "stop": []}
    nothing |= {"adapter_id": "", "top_k": 0, "top_p": 1.0}
    assert post("/", "abc", **nothing).status_code == 200
    assert post("/generate_stream", "abc", **nothing).status_code == 200


def test_what_needs_the_whole_answer_cannot_be_streamed(post):
    for field, value in (("best_of", 2), ("decoder_input_details", True)):
        response = post("/generate_stream", "a", do_sample=True, **{field: value})
        assert response.status_code == 400
        assert response.json()["param"] == f"parameters.{field}"
        assert "stream" in response.json()["error"]
    response = post("/generate_stream", "a", stream=False)
    assert (response.status_code, response.json()["param"]) == (400, "stream")


# -- answers --------------------------------------------------------------------------------------


def test_the_answer_is_in_a_list(post):
    response = post("/", "abc", max_new_tokens=5)
    assert response.json() == [{"generated_text": "cbacb"}]


def test_a_hundred_tokens_or_what_fits(post):
    assert len(post("/", "a" * 10).json()[0]["generated_text"]) == 100
    assert len(post("/", "a" * 200).json()[0]["generated_text"]) == 56
    response = post("/", "a" * 200, max_new_tokens=57)
    assert (response.status_code, response.json()["code"]) == (400, "context_length_exceeded")


def test_the_prompt_comes_first_if_asked(post):
    parameters = {"max_new_tokens": 2, "return_full_text": True}
    assert post("/", "abc", **parameters).json() == [{"generated_text": "abccb"}]
    events = events_of(post("/generate_stream", "abc", **parameters))
    assert events[-1]["generated_text"] == "abccb"
    assert [event["token"]["text"] for event in events] == ["c", "b"]


def test_truncate_keeps_the_end_of_the_prompt(post, fake_engine, byte_tokenizer):
    assert post("/", "xy" * 1000, truncate=3, max_new_tokens=3).status_code == 200
    assert fake_engine.requests[0].prompt_token_ids == byte_tokenizer.encode("yxy")


def test_details(post, byte_tokenizer, fake_engine):
    ids = [*byte_tokenizer.encode("é!"), EOS]
    fake_engine.answer = lambda request, index: ids
    response = post("/", "ab", details=True, decoder_input_details=True, top_n_tokens=2)
    (answer,) = response.json()
    details = answer["details"]
    tokens, top = details.pop("tokens"), details.pop("top_tokens")
    prompt = byte_tokenizer.encode("ab")
    assert details == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,
        "prefill": [
            {"id": prompt[0], "text": "a", "logprob": None},
            {"id": prompt[1], "text": "b", "logprob": -0.5},
        ],
    }
    assert [token["id"] for token in tokens] == ids
    assert [token["text"] for token in tokens] == ["", "é", "!", ""]
    assert [token["special"] for token in tokens] == [False, False, False, True]
    assert all(token["logprob"] == -0.5 for token in tokens)
    assert [[entry["id"] for entry in row] for row in top] == [[i, i + 1] for i in ids]
    assert set(top[0][0]) == {"id", "text", "logprob", "special"}


def test_the_best_has_the_highest_mean_logprob(post, fake_engine, byte_tokenizer):
    letters = {index: byte_tokenizer.encode(text) for index, text in enumerate(("aaa", "b", "cc"))}
    fake_engine.answer = lambda request, index: letters[index]
    likely = {letters[2][0]: -0.1, letters[0][0]: -0.2, letters[1][0]: -0.3}
    submit = fake_engine.submit

    def submit_with_logprobs(request):
        generation = submit(request)
        push = generation.push

        def push_with_logprobs(deltas):
            for delta in deltas:
                delta.logprobs = [
                    entry._replace(logprob=likely[entry.token_id]) for entry in delta.logprobs
                ]
            push(deltas)

        generation.push = push_with_logprobs
        return generation

    fake_engine.submit = submit_with_logprobs
    (answer,) = post("/", "x", best_of=3, do_sample=True, seed=5, details=True).json()
    assert answer["generated_text"] == "cc"
    assert answer["details"]["seed"] == 5
    others = answer["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == ["aaa", "b"]
    assert [other["generated_tokens"] for other in others] == [3, 1]
    assert post("/", "x", best_of=3, do_sample=True).json() == [{"generated_text": "cc"}]


@pytest.mark.parametrize("text", ["hello", "hé 🙂", "日本"])
def test_a_stream_is_the_whole_answer_token_by_token(post, fake_engine, byte_tokenizer, text):
    ids = [*byte_tokenizer.encode(text), EOS]
    fake_engine.answer = lambda request, index: ids

    def as_worker(request):
        """The fake engine decodes token by token; the real one never splits a character."""
        generation = submit(request)
        detokenizer, push = IncrementalDetokenizer(byte_tokenizer), generation.push

        def push_whole_characters(deltas):
            for delta in deltas:
                delta.text = detokenizer.push(delta.token_ids)
            push(deltas)

        generation.push = push_whole_characters
        return generation

    submit, fake_engine.submit = fake_engine.submit, as_worker
    (whole,) = post("/", "x", details=True).json()
    events = events_of(post("/generate_stream", "x", details=True))
    assert [event["index"] for event in events] == list(range(1, len(ids) + 1))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert "".join(event["token"]["text"] for event in events) == text == whole["generated_text"]
    assert all(event["generated_text"] is event["details"] is None for event in events[:-1])
    assert events[-1]["generated_text"] == text
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(ids),
        "input_length": 1,
        "seed": None,
    }


def test_several_tokens_of_a_step_are_an_event_each(post, fake_engine, monkeypatch):
    """Text comes with the last of them, and top tokens with each."""

    def submit(request):
        generation = Generation(request, abort=lambda _: None)
        rows = [TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in (5, 6, 7)]
        generation.push([Delta(0, "ab", [5, 6], rows[:2])])
        generation.push([Delta(0, "c", [7], rows[2:], "stop", "c")])
        return generation

    monkeypatch.setattr(fake_engine, "submit", submit)
    events = events_of(post("/generate_stream", "x", top_n_tokens=1, details=True, seed=4))
    assert [event["token"]["id"] for event in events] == [5, 6, 7]
    assert [event["token"]["text"] for event in events] == ["", "ab", "c"]
    assert [event["top_tokens"][0]["id"] for event in events] == [5, 6, 7]
    assert events[-1]["generated_text"] == "abc"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["details"]["seed"] is None  # nothing was drawn with it


def test_stream_chooses_the_form_at_the_root(post):
    assert len(events_of(post("/", "abc", stream=True, max_new_tokens=3))) == 3
    assert post("/", "abc", stream=False, max_new_tokens=3).json()[0]["generated_text"] == "cba"


def test_infinity_is_written_as_a_number(post, fake_engine, monkeypatch):
    def submit(request):
        generation = Generation(request, abort=lambda _: None)
        row = TokenLogprobs(5, -float("inf"), 9, ((5, -float("inf")),))
        generation.push([Delta(0, "a", [5], [row], "length")])
        return generation

    monkeypatch.setattr(fake_engine, "submit", submit)
    (event,) = events_of(post("/generate_stream", "x", top_n_tokens=1))
    assert event["token"]["logprob"] == event["top_tokens"][0]["logprob"] == -9999.0


def test_an_answer_from_the_cache_is_marked(ask, fake_engine, create_service):
    cache = ResponseCache(fake_engine, 1 << 20)
    served = create_service(fake_engine, cache=cache)
    body = {"inputs": "abc", "parameters": {"details": True}}
    for path in ("/", "/generate_stream"):
        cache.clear()  # or the stream would be answered with the whole answer's tokens
        first = ask("POST", path, served=served, json=body)
        again = ask("POST", path, served=served, json=body)
        assert "x-octavo-cache" not in first.headers
        assert again.headers["x-octavo-cache"] == "hit"
        assert again.text == first.text
    assert len(fake_engine.requests) == 2


# -- failures -------------------------------------------------------------------------------------


def test_overload_is_said_in_both_forms(post, fake_engine):
    fake_engine.submit_error = QueueFullError("full", 3.0)
    for path in ("/", "/generate_stream"):
        response = post(path, "a")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error_type"] == "overloaded"


def test_a_failure_is_a_status_or_the_last_event(post, fake_engine):
    fake_engine.error_after, fake_engine.error = 0, DeadlineError("too late")
    for path in ("/", "/generate_stream"):
        response = post(path, "a")
        assert (response.status_code, response.json()["error_type"]) == (504, "timeout")
    fake_engine.error_after, fake_engine.error = 2, RuntimeError("secret")
    *events, error = events_of(post("/generate_stream", "a"))
    assert len(events) == 2
    assert error["error_type"] == "generation" and "secret" not in error["error"]


def test_info(ask):
    info = ask("GET", "/info").json()
    assert (info["model_id"], info["version"]) == ("tiny", __version__)
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (255, 256)


def test_openapi_describes_the_stream(fake_engine, create_service, create_test_app):
    document = create_test_app(tgi.create_router(create_service(fake_engine))).openapi()
    content = document["paths"]["/generate_stream"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"text/event-stream"}
    content = document["paths"]["/"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    assert "TgiParameters" in document["components"]["schemas"]


# -- Hugging Face's own client --------------------------------------------------------------------


@pytest.fixture
def live_url(fake_engine, create_service, create_test_app):
    """A real server, in a thread."""
    app = create_test_app(tgi.create_router(create_service(fake_engine)))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_hugging_faces_client(live_url, fake_engine):
    with InferenceClient(model=live_url, token="key") as client:
        text = client.text_generation("abc", max_new_tokens=6, temperature=0.5, seed=3)
        assert text == "cbacba"
        pieces = list(client.text_generation("abc", max_new_tokens=6, stream=True))
        assert pieces == list("cbacba")

        answer = client.text_generation(
            "abc", max_new_tokens=2, details=True, decoder_input_details=True, top_n_tokens=1
        )
        assert answer.generated_text == "cb"
        assert answer.details.finish_reason == "length"
        assert [token.text for token in answer.details.tokens] == ["c", "b"]
        assert [token.text for token in answer.details.prefill] == ["a", "b", "c"]

        *tokens, last = client.text_generation("abc", max_new_tokens=3, details=True, stream=True)
        assert [each.token.text for each in tokens] == ["c", "b"]
        assert (last.generated_text, last.details.generated_tokens) == ("cba", 3)

        with pytest.raises(ValidationError, match="watermark"):
            client.text_generation("abc", watermark=True)
        with pytest.raises(ValidationError, match="watermark"):
            list(client.text_generation("abc", watermark=True, stream=True))
        fake_engine.submit_error = QueueFullError("full", 1.0)
        with pytest.raises(OverloadedError):
            client.text_generation("abc")


def test_many_details_are_written_in_the_background(post, monkeypatch):
    asked = {"details": True, "decoder_input_details": True, "max_new_tokens": 5, "seed": 1}
    small = post("/", "abc" * 40, **asked).json()
    called = []

    async def in_background(function, *args):
        called.append(function)
        return function(*args)

    monkeypatch.setattr("octavo.server.api.generation_job.MANY_ENTRIES", 100)
    monkeypatch.setattr("octavo.server.api.generation_job.in_background", in_background)
    assert post("/", "abc" * 40, **asked).json() == small
    assert len(called) == 1
