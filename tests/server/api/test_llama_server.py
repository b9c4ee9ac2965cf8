"""What clients of llama.cpp's server send and read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from writing_engine import send as send_to

from octavo import __version__
from octavo.core.batch import TokenLogprobs
from octavo.core.sink_window import SinkWindowRules
from octavo.server.api.fill_in import FillInTokens
from octavo.server.api.llama_server.routes import create_router
from octavo.server.app import create_server_app
from octavo.server.engine.generation import Generation
from octavo.server.http.tenants import Tenants
from octavo.server.watch.metrics import Metrics
from octavo.serving.outputs import Delta

A, B = 64, 65  # the byte tokenizer's ids
KEYS = {
    "index",
    "content",
    "tokens",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}


@pytest.fixture
def service(fake_engine, create_service):
    return create_service(fake_engine)


@pytest.fixture
def ask(service, send):
    return partial(send, create_router(service))


@pytest.fixture
def complete(ask):
    def complete(status=200, **body):
        response = ask("POST", "/completion", json=body)
        assert response.status_code == status, response.text
        return response.json() if status == 200 else response.json()["error"]

    return complete


@pytest.fixture
def stream(ask):
    def stream(**body):
        response = ask("POST", "/completion", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, rest = response.text.split("\n\n")
        assert rest == ""  # and no [DONE]: that is OpenAI's
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return stream


def test_a_prompt_is_continued(complete, fake_engine):
    answer = complete(prompt="abc", n_predict=5, temperature=0)
    assert answer.keys() == KEYS
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("cbacb", True, "limit")
    assert (answer["tokens"], answer["prompt"], answer["truncated"]) == ([], "abc", False)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (5, 3)
    assert answer["timings"]["predicted_n"] == 5
    assert answer["generation_settings"]["n_predict"] == 5
    assert fake_engine.requests[0].route == "/completion"


def test_a_stream_adds_up_to_the_answer(complete, stream):
    whole = complete(prompt="abc", n_predict=5, temperature=0, return_tokens=True, seed=3)
    *events, last = stream(prompt="abc", n_predict=5, temperature=0, seed=3)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert sum((event["tokens"] for event in events), []) == whole["tokens"]
    assert [event["stop"] for event in events] == [False] * 5
    assert [event["tokens_predicted"] for event in events] == [1, 2, 3, 4, 5]
    whole["generation_settings"]["stream"] = True
    for name in KEYS - {"content", "tokens", "timings"}:
        assert last[name] == whole[name], name


def test_prompts_of_all_shapes(complete, byte_tokenizer):
    ids = byte_tokenizer.encode("bc")
    for prompt in ("abc", {"prompt_string": "abc"}, ["a", *ids], [A, *ids], [A, "bc"]):
        answer = complete(prompt=prompt, n_predict=2)
        if isinstance(prompt, list) and type(prompt[0]) is str:
            assert isinstance(answer, dict)
        assert answer["content"] == "cb"
    answers = complete(prompt=["abc", [A, B], [A, "b"], {"prompt_string": "xyz"}], n_predict=2)
    assert [answer["content"] for answer in answers] == ["cb", "ba", "ba", "zy"]
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert complete(prompt=["abc"], n_predict=2)[0]["content"] == "cb"


@pytest.mark.parametrize(
    "prompt",
    [None, 3, [], [[]], {}, {"prompt_string": 1}, [1.5], [True], [-1], [2**31], [["a", {}]]],
)
def test_what_is_no_prompt_is_refused(complete, prompt):
    assert complete(400, prompt=prompt)["param"].split(".")[0] == "prompt"


def test_prompts_of_more_than_text_are_refused(complete):
    prompt = {"prompt_string": "a", "multimodal_data": ["AAAA"]}
    assert "text only" in complete(400, prompt=prompt)["message"]
    assert "vocabulary" in complete(400, prompt=[100_000])["message"]


def test_without_a_number_the_answer_goes_on_to_the_end_of_the_context(complete):
    for n_predict in (None, -1, -2):
        answer = complete(prompt="a" * 246, n_predict=n_predict)
        assert (answer["tokens_predicted"], answer["truncated"]) == (10, True)
    answer = complete(prompt="a" * 246, n_predict=100)  # cut, and no error
    assert (answer["tokens_predicted"], answer["truncated"]) == (10, True)
    assert complete(prompt="a" * 246, n_predict=10)["truncated"] is False
    assert complete(400, prompt="a" * 256)["code"] == "context_length_exceeded"


def test_nothing_to_predict(complete):
    answer = complete(prompt="abc", n_predict=0, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)


def test_how_it_ends(complete, service, monkeypatch):
    ends = iter([("stop", None), ("stop", "END"), ("stop", 7), ("length", None)])

    def submit(request):
        generation = Generation(request, abort=lambda _: None)
        generation.push([Delta(0, "a\n", [5], [], *next(ends))])
        return generation

    monkeypatch.setattr(service.engine, "submit", submit)
    answers = [complete(prompt="x", n_predict=1, stop=["END"]) for _ in range(4)]
    assert [answer["stop_type"] for answer in answers] == ["eos", "word", "word", "limit"]
    assert [answer["stopping_word"] for answer in answers] == ["", "END", "", ""]
    assert all(answer["has_new_line"] for answer in answers)


def test_fields_reach_the_engine(complete, fake_engine):
    complete(
        prompt="abc",
        n_predict=3,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.8,
        top_n_sigma=1.5,
        xtc_probability=0.4,
        dry_multiplier=0.7,
        dry_sequence_breakers=["\n"],
        repeat_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        seed=11,
        stop="END",
        ignore_eos=True,
        logit_bias=[[5, 1.5], ["ab", -100], [7, False]],
        n_probs=2,
    )
    params = fake_engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (3, 0.5, 5, 0.9)
    assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.1, 0.8, 1.2)
    assert (params.top_n_sigma, params.xtc_probability) == (1.5, 0.4)
    assert (params.dry_multiplier, params.dry_sequence_breakers) == (0.7, ("\n",))
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.3, 0.4, 11)
    assert (params.stop, params.ignore_eos, params.logprobs) == (("END",), True, 2)
    assert params.logit_bias == {5: 1.5, A: -100.0, B: -100.0, 7: -100.0}
    complete(prompt="abc", temperature=-1, top_k=-1, seed=-5, max_tokens=4, logit_bias={"5": 2})
    params = fake_engine.requests[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 4)
    assert params.seed >= 0 and params.logit_bias == {5: 2.0}


def test_a_prompt_may_be_kept_from_the_cache(complete, fake_engine):
    for cache_prompt in (True, None, False, False):
        complete(prompt="abc", n_predict=1, cache_prompt=cache_prompt)
    assert [r.params.cache_prompt for r in fake_engine.requests] == [True, True, False, False]
    assert len({request.cache_salt for request in fake_engine.requests}) == 1


def test_special_tokens_in_a_prompt_are_special(complete, fake_engine, byte_tokenizer):
    text = byte_tokenizer.token_text(256)
    complete(prompt=f"a{text}", n_predict=1)
    assert fake_engine.requests[-1].prompt_token_ids == [A, 256]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", 1.5),
        ("temperature", "1"),
        ("n_probs", 21),
        ("logit_bias", [[1]]),
        ("logit_bias", [[1, True]]),
        ("logit_bias", [[1, 200]]),
        ("logit_bias", "x"),
        ("logit_bias", [["a" * 4096, 1]] * 5),  # a request may say so much, and no more
        ("logit_bias", [[1.5, 1]]),
        ("stop", 3),
        ("grammar", {"type": "object"}),
        ("json_schema", 3),
        ("grammar_lazy", True),
        ("mirostat", 2),
        ("lora", [{"id": 0, "scale": 1}]),
        ("post_sampling_probs", True),
        ("n", 2),
        ("best_of", 2),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(complete, field, value):
    error = complete(400, **{"prompt": "abc", field: value})
    assert error["param"] == field and field in error["message"]


def test_what_has_no_effect_is_dropped(complete):
    fields = {"id_slot": 0, "n_keep": 5, "samplers": ["top_k"], "dry_base": 1.75, "lora": []}
    assert complete(prompt="abc", n_predict=2, **fields)["content"] == "cb"


def test_probabilities(complete, stream, service, monkeypatch):
    def submit(request):
        generation = Generation(request, abort=lambda _: None)
        row = TokenLogprobs(A, -0.5, 1, ((A, -0.5), (B, -float("inf"))))
        generation.push([Delta(0, "a", [A], [row], "length")])
        return generation

    monkeypatch.setattr(service.engine, "submit", submit)
    wanted = {
        "id": A,
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"id": A, "token": "a", "bytes": [97], "logprob": -0.5},
            {"id": B, "token": "b", "bytes": [98], "logprob": -9999.0},
        ],
    }
    assert complete(prompt="x", n_predict=1, n_probs=2)["completion_probabilities"] == [wanted]
    first, last = stream(prompt="x", n_predict=1, n_probs=2)
    assert first["completion_probabilities"] == [wanted]
    assert "completion_probabilities" not in last


def test_only_the_fields_that_were_asked_for(complete):
    paths = ["content", "generation_settings/n_predict", "no/such", "prompt"]
    answer = complete(prompt="abc", n_predict=2, response_fields=paths)
    assert answer == {"content": "cb", "generation_settings/n_predict": 2, "prompt": "abc"}
    assert complete(prompt="abc", n_predict=2, response_fields=[]).keys() == KEYS


def test_timings_of_each_token(stream):
    events = stream(prompt="abc", n_predict=2, timings_per_token=True)
    assert all("timings" in event for event in events)
    assert "timings" not in stream(prompt="abc", n_predict=2)[0]


def test_a_sample_that_failed_is_an_error(complete, ask, service, monkeypatch):
    def submit(request):
        generation = Generation(request, abort=lambda _: None)
        generation.push([Delta(0, "", [], [], "error", error="damaged")])
        return generation

    monkeypatch.setattr(service.engine, "submit", submit)
    complete(500, prompt="x")
    assert ask("POST", "/completion", json={"prompt": "x", "stream": True}).status_code == 500


def test_props(ask, fake_engine):
    props = ask("GET", "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["total_slots"] == 64
    assert props["model_alias"] == props["model_path"] == "tiny"
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"] == f"octavo-{__version__}"
    assert props["chat_template"]


def test_a_template_is_applied(ask, service):
    messages = [{"role": "user", "content": "hi"}]
    answer = ask("POST", "/apply-template", json={"messages": messages}).json()
    assert answer == {"prompt": asyncio.run(service.prompts.chat(messages)).text}
    without = ask(
        "POST", "/apply-template", json={"messages": messages, "add_generation_prompt": False}
    ).json()
    assert answer["prompt"].startswith(without["prompt"]) and answer != without


def test_a_context_that_is_shifted_may_be_outgrown(complete, fake_engine):
    assert complete(prompt="abc", n_predict=300, n_keep=2)["tokens_predicted"] == 253  # not shifted
    rules = SinkWindowRules(context_shift=True)
    fake_engine.facts = replace(fake_engine.facts, sink_windows=rules)
    for n_keep, kept in ((2, 2), (-1, 3), (None, None)):
        assert complete(prompt="abc", n_predict=300, n_keep=n_keep)["tokens_predicted"] == 300
        assert fake_engine.requests[-1].params.n_keep == kept
    assert complete(prompt="abc", n_predict=-1)["tokens_predicted"] == 253


# -- /infill, /slots and prompts that are too long -----------------------------------------------


def test_a_gap_is_filled_in(ask, fake_engine, service, monkeypatch):
    tokenizer = service.prompts.tokenizer
    body = {"input_prefix": "ab", "input_suffix": "d", "prompt": "c", "n_predict": 3}
    refused = ask("POST", "/infill", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_suffix"
    monkeypatch.setattr(FillInTokens, "of", lambda _: FillInTokens(240, 241, 242, 243, 244))
    answer = ask("POST", "/infill", json=body)
    assert answer.status_code == 200, answer.text

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = fake_engine.requests[-1].prompt_token_ids
    assert prompt == [240, *ids("ab"), 241, *ids("d"), 242, *ids("c")]
    extra = [{"filename": "x.py", "text": "import y"}, {"text": "z"}]
    ask("POST", "/infill", json={**body, "prompt": "", "input_extra": extra})
    prompt = fake_engine.requests[-1].prompt_token_ids
    others = [243, *ids("\n"), 244, *ids("x.py\nimport y"), 244, *ids("file\nz"), 244]
    assert prompt == [*others, 240, *ids("ab"), 241, *ids("d"), 242]
    assert ask("POST", "/infill", json={**body, "prompt": ["a", "b"]}).status_code == 400


def test_tokens_for_filling_in_are_known_by_their_names(byte_tokenizer):
    class Known:
        def __init__(self, **ids):
            self.specials = SimpleNamespace(matcher=SimpleNamespace(ids=ids))

    assert FillInTokens.of(byte_tokenizer) is None
    qwen = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|file_sep|>": 4}
    assert FillInTokens.of(Known(**qwen)) == FillInTokens(1, 2, 3, None, 4)
    assert FillInTokens.of(Known(**{"<fim_prefix>": 1})) is None


def test_slots_say_how_many_requests_run(ask, fake_engine):
    fake_engine.stats = replace(fake_engine.stats, num_running=2)
    slots = ask("GET", "/slots").json()
    assert len(slots) == 64 and [slot["is_processing"] for slot in slots[:3]] == [True, True, False]
    assert slots[0]["n_ctx"] == 256
    fake_engine.stats = replace(fake_engine.stats, num_running=64)
    assert ask("GET", "/slots", params={"fail_on_no_slot": 1}).status_code == 503
    assert ask("GET", "/slots").status_code == 200


def test_a_prompt_that_is_too_long_has_llama_cpps_error(complete):
    error = complete(400, prompt="a" * 300)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (300, 256)


def test_a_chat_that_is_too_long_has_it_where_llama_cpps_clients_ask(service):
    service = replace(service, metrics=Metrics("tiny"))
    app = create_server_app(service, Tenants(service.settings))
    body = {"messages": [{"role": "user", "content": "a" * 300}]}

    def error(path):
        answer = send_to(app, "POST", path, json=body, headers={"host": "localhost"})
        assert answer.status_code == 400
        return answer.json()["error"]

    service.prompts._chat_template = "{{ messages[0].content }}"
    assert error("/chat/completions")["type"] == "exceed_context_size_error"
    assert error("/chat/completions")["n_ctx"] == 256
    assert error("/v1/chat/completions")["type"] == "invalid_request_error"
    path = "/chat/completions/input_tokens"
    counted = send_to(app, "POST", path, json=body, headers={"host": "localhost"})
    assert counted.json() == {"input_tokens": 300}
