"""Request bodies: every bound, every type, and the fields that are refused by name."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N
from octavo.server.api.openai.chat_body import ChatCompletionRequest
from octavo.server.api.openai.completion_body import CompletionRequest
from octavo.server.http.body import read_model
from octavo.server.http.context import IgnoredFields
from octavo.server.http.errors import HttpError
from octavo.server.settings import MAX_PROMPTS

USER = [{"role": "user", "content": "hi"}]
MINIMAL = {ChatCompletionRequest: {"messages": USER}, CompletionRequest: {"prompt": "hi"}}
MODELS = list(MINIMAL)
HUGE = 2**31 - 1


def read(model, *, ignored=None, **fields):
    return read_model(model, json.dumps({**MINIMAL[model], **fields}).encode(), ignored)


def refusal(model, *, strict=False, **fields) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(model, ignored=IgnoredFields(strict=strict), **fields)
    assert caught.value.status == 400
    return caught.value


# field: lowest, highest, step
INTEGERS = {
    "n": (1, MAX_N),
    "min_tokens": (0, HUGE),
    "top_k": (-1, HUGE),
    "seed": (-(2**64), 2**64 - 1),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, HUGE),
    "priority": (-HUGE, HUGE),
}
CHAT_INTEGERS = {
    "max_tokens": (1, HUGE),
    "max_completion_tokens": (1, HUGE),
    "top_logprobs": (0, MAX_LOGPROBS),
}
COMPLETION_INTEGERS = {
    "max_tokens": (-1, HUGE),
    "best_of": (1, MAX_N),
    "logprobs": (0, MAX_LOGPROBS),
}
# field: lowest, highest, whether the lowest itself is accepted
NUMBERS = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "typical_p": (0, 1, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "repetition_penalty": (0, 1000, False),
    "xtc_probability": (0, 1, True),
    "xtc_threshold": (0, 1, True),
    "dry_multiplier": (0, 100, True),
    "dry_base": (1, 100, True),
    "timeout": (0, 86400, False),
}
NO_NUMBERS = [True, "1", [1], {}, 10**400, -(10**400)]


def integers():
    for model, fields in (
        (ChatCompletionRequest, INTEGERS | CHAT_INTEGERS),
        (CompletionRequest, INTEGERS | COMPLETION_INTEGERS),
    ):
        for name, (low, high) in fields.items():
            yield pytest.param(model, name, low, high, id=f"{model.__name__}-{name}")


@pytest.mark.parametrize(("model", "name", "low", "high"), list(integers()))
def test_bounds_of_integers(model, name, low, high):
    for value in (low, low + 1, high - 1, high):
        assert getattr(read(model, **{name: value}), name) == value
    assert getattr(read(model, **{name: None}), name) is None
    if (low, name) == (1, "max_tokens") or name == "max_completion_tokens":
        assert getattr(read(model, **{name: -1}), name) is None  # as many as there is room for
    for value in (low - 1, high + 1, -(2**65), 2**64, 1.5, 1.0, 1e308, *NO_NUMBERS):
        assert refusal(model, **{name: value}).param == name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_of_numbers(model, name):
    low, high, includes_low = NUMBERS[name]
    step = 2**-20
    for value in (low + step, high - step, high, (low + high) // 2 or high):
        assert getattr(read(model, **{name: value}), name) == value
    assert getattr(read(model, **{name: None}), name) is None
    if includes_low:
        assert getattr(read(model, **{name: low}), name) == low
        if low == 0:
            assert getattr(read(model, **{name: -0.0}), name) == 0
    else:
        assert refusal(model, **{name: low}).param == name
    for value in (low - step, high + step, 2**31, 2**63, 1e308, -1e308, *NO_NUMBERS):
        assert refusal(model, **{name: value}).param == name


@pytest.mark.parametrize("model", MODELS)
def test_not_a_number_is_not_json(model):
    for constant in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = json.dumps(MINIMAL[model])[:-1] + f', "temperature": {constant}}}'
        with pytest.raises(HttpError, match="JSON"):
            read_model(model, body.encode())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name",
    [
        "stream",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_token_ids",
    ],
)
def test_booleans_are_booleans(model, name):
    for value in (True, False, None):
        assert getattr(read(model, **{name: value}), name) is value
    for value in (0, 1, "true", []):
        assert refusal(model, **{name: value}).param == name


@pytest.mark.parametrize("model", MODELS)
def test_stop(model):
    assert read(model).stop_strings() == []
    assert read(model, stop=None).stop_strings() == read(model, stop=[]).stop_strings() == []
    assert read(model, stop="END").stop_strings() == ["END"]
    assert read(model, stop=["a", "b"]).stop_strings() == ["a", "b"]
    assert len(read(model, stop=["a"] * 16).stop_strings()) == 16
    for wrong in (["a"] * 17, 3, {}, True, "x" * 5000, ""):
        assert refusal(model, stop=wrong).param == "stop"
    for wrong in ([3], [""], [None]):
        assert refusal(model, stop=wrong).param == "stop.0"


@pytest.mark.parametrize("model", MODELS)
def test_logit_bias(model):
    assert read(model, logit_bias={"5": -100, "7": 100.0}).logit_bias == {"5": -100, "7": 100}
    assert read(model, logit_bias={}).logit_bias == {}
    for wrong in ({"5": 100.1}, {"5": -101}, {"5": True}, {"5": "1"}):
        assert refusal(model, logit_bias=wrong).param == "logit_bias.5"
    for wrong in ("x", "-1", "1.5", "", "99999999999"):
        assert refusal(model, logit_bias={wrong: 1}).param == f"logit_bias.{wrong}"
    assert refusal(model, logit_bias={str(i): 1 for i in range(1025)}).param == "logit_bias"


@pytest.mark.parametrize("model", MODELS)
def test_ids_of_requests_are_safe_to_repeat(model):
    assert read(model, request_id="abc-123").request_id == "abc-123"
    for wrong in ("", "a b", "a\nb", "a\r\nSet-Cookie: x", "é", "x" * 129, 5):
        assert refusal(model, request_id=wrong).param == "request_id"


REFUSED = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "logprob_token_ids": [1],
    "kv_transfer_params": {"a": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "grammar_lazy": True,
    "stop_regex": "a+",
    "mirostat": 2,
    "lora": [{"id": 0, "scale": 1.0}],
}
REFUSED_IN_CHAT = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "echo": True,
    "web_search_options": {"a": 1},
    "best_of": 2,
}
REFUSED_IN_COMPLETIONS = {
    "suffix": "end",
    "prompt_embeds": "abc",
    "messages": USER,
    "max_completion_tokens": 5,
}


def refused():
    for model, own in (
        (ChatCompletionRequest, REFUSED_IN_CHAT),
        (CompletionRequest, REFUSED_IN_COMPLETIONS),
    ):
        for name, value in (REFUSED | own).items():
            yield pytest.param(model, name, value, id=f"{model.__name__}-{name}")


@pytest.mark.parametrize(("model", "name", "value"), list(refused()))
def test_what_the_engine_cannot_do_is_refused_by_name(model, name, value):
    error = refusal(model, **{name: value})
    assert error.param == name
    assert error.message.startswith(f"{name}: ")
    read(model, **{name: None})


@pytest.mark.parametrize("model", MODELS)
def test_what_asks_for_nothing_is_accepted(model):
    read(
        model,
        use_beam_search=False,
        length_penalty=1.0,
        structured_outputs=None,
        stream_interval=1,
        store=False,
        service_tier="auto",
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        response_format={"type": "text"},
        vllm_xargs={},
        spaces_between_special_tokens=True,
        stop=[],
        stop_token_ids=[],
        bad_words=[],
        allowed_token_ids=[],
        logit_bias={},
    )


UNKNOWN = {"temprature": 1, "cache_prompt": True, "x": {"y": [1]}}
NO_EFFECT = {
    "vllm_xargs": {"a": 1},
    "stream_interval": 4,
    "store": True,
    "service_tier": "flex",
    "user": 7,
    "metadata": {"a": 1},
    "prompt_cache_key": "k",
}
NO_EFFECT_IN_CHAT = {
    "prediction": {"type": "content"},
    "verbosity": "low",
    "mm_processor_kwargs": {"a": 1},
}


@pytest.mark.parametrize("model", MODELS)
def test_fields_without_effect_are_dropped_and_named(model):
    fields = UNKNOWN | NO_EFFECT | (NO_EFFECT_IN_CHAT if model is ChatCompletionRequest else {})
    ignored = IgnoredFields()
    body = read(model, ignored=ignored, **fields, stream_options={"usage": True}, top_k=3)
    assert set(ignored.names) == {*fields, "usage"}
    assert body == read(model, stream_options={}, top_k=3)


@pytest.mark.parametrize("model", MODELS)
def test_strict_fields_are_refused(model):
    for name in UNKNOWN:
        error = refusal(model, strict=True, **{name: UNKNOWN[name]})
        assert error.message == f"{name}: is not a known field"
    assert refusal(model, strict=True, stream_options={"u": True}).param == "stream_options.u"
    for name in ("vllm_xargs", "stream_interval", "store", "service_tier", "user"):
        assert refusal(model, strict=True, **{name: NO_EFFECT[name]}).param == name
    ignored = IgnoredFields(strict=True)
    read(model, ignored=ignored, user="u", store=False, service_tier="auto", vllm_xargs=None)
    assert ignored.names == ()


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_asked_for_is_not_named(model):
    ignored = IgnoredFields()
    read(model, ignored=ignored, a=None, b=False, c=[], d={}, store=False, user=None)
    assert ignored.names == ()


def test_names_that_are_odd_or_many_share_one():
    ignored = IgnoredFields()
    read(CompletionRequest, ignored=ignored, **{"a\r\nset-cookie: x": 1, "é": 1, "b" * 65: 1})
    assert ignored.names == ("...",)
    ignored = IgnoredFields()
    read(CompletionRequest, ignored=ignored, **{f"f{i}": 1 for i in range(500)})
    assert len(ignored.names) == 33 and ignored.names[-1] == "..."


@pytest.mark.parametrize("model", MODELS)
def test_llama_cpps_names(model):
    body = read(model, n_predict=7, repeat_penalty=1.5)
    assert (body.max_tokens, body.repetition_penalty) == (7, 1.5)
    assert read(model, n_predict=7, max_tokens=5).max_tokens == 5
    assert refusal(model, n_predict="x").param == "max_tokens"
    assert refusal(model, strict=True, n_predict=7).param == "n_predict"


@pytest.mark.parametrize("model", MODELS)
def test_any_seed_below_zero_is_none(model):
    assert [read(model, seed=seed).own_seed for seed in (None, -1, -7, -(2**63))] == [None] * 4
    assert read(model, seed=0).own_seed == 0


# -- messages ----------------------------------------------------------------------------------


def test_messages_of_all_roles():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None},
    ]
    body = read(ChatCompletionRequest, messages=messages)
    plain = body.to_chat().messages
    assert plain[2]["content"] == messages[2]["content"]
    assert plain[3] == {"role": "assistant", "tool_calls": [call]}
    assert plain[5] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages.0.role"),
        ({"role": "king", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": ["x"]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages.0.audio"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0.function"),
        ("x", "messages.0"),
    ],
)
def test_wrong_messages(message, param):
    assert refusal(ChatCompletionRequest, messages=[message]).param == param


def test_what_agents_leave_in_messages_is_dropped():
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "assistant", "content": [part], "weight": 1, "refusal": "no"}
    ignored = IgnoredFields()
    body = read(ChatCompletionRequest, ignored=ignored, messages=[message])
    assert set(ignored.names) == {"cache_control", "weight", "refusal"}
    assert body.to_chat().messages == [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    ]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
def test_parts_that_are_not_text_are_refused_by_name(kind):
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "http://x"}}]
    error = refusal(ChatCompletionRequest, messages=[{"role": "user", "content": parts}])
    assert error.param == "messages.0.content.1" and kind in error.message


def test_conversations_are_not_empty_or_endless():
    assert refusal(ChatCompletionRequest, messages=[]).param == "messages"
    assert refusal(ChatCompletionRequest, messages=None).param == "messages"
    assert refusal(ChatCompletionRequest, messages=USER * 4097).param == "messages"


def test_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = read(ChatCompletionRequest, tools=[tool])
    assert body.to_chat().tools == [tool]
    assert read(ChatCompletionRequest, tools=[tool], tool_choice="auto").to_chat().tools
    assert read(ChatCompletionRequest, tools=[tool], tool_choice="none").to_chat().tools is None
    assert read(ChatCompletionRequest, tools=[]).to_chat().tools is None
    named = {"type": "function", "function": {"name": "f"}}
    assert read(ChatCompletionRequest, tools=[tool], tool_choice=named).tool_choice == named
    assert refusal(ChatCompletionRequest, tools=[tool], tool_choice=1).param == "tool_choice"
    assert refusal(ChatCompletionRequest, tools=[{"type": "x"}]).param == "tools.0.type"
    assert refusal(ChatCompletionRequest, tools=[tool] * 129).param == "tools"


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_prompts(prompt, expected):
    assert read(CompletionRequest, prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], [1, "a"], [1, 2.0], [True], [-1], [2**31], [[1], [-1]], {}, 5, ["a", None]],
)
def test_wrong_prompts(prompt):
    assert refusal(CompletionRequest, prompt=prompt).param == "prompt"


def test_too_many_prompts():
    assert "256" in refusal(CompletionRequest, prompt=["a"] * (MAX_PROMPTS + 1)).message
    with pytest.raises(HttpError, match="prompt: is required"):
        read_model(CompletionRequest, b"{}")


# -- what clients send -------------------------------------------------------------------------


def test_bodies_of_the_openai_types_are_accepted():
    """Every field of OpenAI's own request types is known here, if not always obeyed."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for types, model in (
        (chat_create_params, ChatCompletionRequest),
        (completion_create_params, CompletionRequest),
    ):
        names = set()
        for kind in ("CompletionCreateParamsBase", "CompletionCreateParamsStreaming"):
            names |= set(getattr(types, kind).__annotations__)
        assert names <= set(model.model_fields)


def test_schemas_are_complete():
    for model in MODELS:
        properties = TypeAdapter(model).json_schema()["properties"]
        assert properties.keys() == model.model_fields.keys()
        assert properties["top_k"]["anyOf"][0]["minimum"] == -1
    prompt = CompletionRequest.model_json_schema()["properties"]["prompt"]
    assert [kind["type"] for kind in prompt["anyOf"]] == ["string", "array", "array"]
