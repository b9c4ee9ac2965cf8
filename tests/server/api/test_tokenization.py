from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from pace import python_seconds

from octavo.server.api.octavo import tokenization

MESSAGES = [{"role": "user", "content": "hé <eos>"}]


@pytest.fixture
def post(fake_engine, create_service, send):
    """Posts JSON to the routes of a server with the given settings."""

    def post(path, body, **settings):
        router = tokenization.create_router(create_service(fake_engine, **settings))
        return send(router, "POST", path, json=body)

    return post


def error_of(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_text_becomes_tokens(post, byte_tokenizer):
    answer = post("/tokenize", {"prompt": "hé", "model": "also-tiny"}).json()
    assert answer == {"count": 3, "max_model_len": 256, "tokens": byte_tokenizer.encode("hé")}


def test_tokens_come_with_their_text_if_asked(post):
    answer = post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]


def test_special_tokens_are_not_in_text(post, byte_tokenizer):
    answer = post("/tokenize", {"prompt": "<eos>", "add_special_tokens": False}).json()
    assert answer["count"] == 5
    assert byte_tokenizer.decode(answer["tokens"]) == "<eos>"
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_a_conversation_becomes_the_tokens_of_its_template(post, byte_tokenizer):
    answer = post("/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json()
    assert answer["tokens"] == byte_tokenizer.apply_chat_template(MESSAGES)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["tokens"][-1] == 259  # <|assistant|>

    finished = post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert finished["tokens"] == answer["tokens"][:-1]
    assert finished["tokens"].count(256) == 1  # the template's <eos>, not the user's

    assistant = [*MESSAGES, {"role": "assistant", "content": "so"}]
    going_on = post("/tokenize", {"messages": assistant, "continue_final_message": True}).json()
    assert byte_tokenizer.decode(going_on["tokens"]).endswith("so")


def test_a_template_of_the_request_needs_trust(post):
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].role }}"}
    assert error_of(post("/tokenize", body))["param"] == "chat_template"
    answer = post("/tokenize", body, trust_request_chat_template=True).json()
    assert answer["count"] == len("user")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "either prompt or messages"),
        ({"prompt": "a", "messages": MESSAGES}, None, "either prompt or messages"),
        ({"prompt": None}, "prompt", "string"),
        ({"prompt": 1}, "prompt", "string"),
        ({"prompt": ["a"]}, "prompt", "string"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "boolean"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": ["hi"]}, "messages.0", "dictionary"),
        ({"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text"),
        (
            {
                "messages": MESSAGES,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
            "add_generation_prompt",
        ),
    ],
)
def test_a_wrong_field_is_named(post, body, param, words):
    error = error_of(post("/tokenize", body))
    assert error["param"] == param
    assert words in error["message"]


def test_fields_that_ask_for_nothing_are_accepted(post):
    nothing = {
        "model": None,
        "tools": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "media_io_kwargs": {},
        "mm_processor_kwargs": None,
        "return_token_strs": None,
        "add_special_tokens": None,
        "add_generation_prompt": None,
        "continue_final_message": None,
    }
    plain = post("/tokenize", {"messages": MESSAGES}).json()
    assert post("/tokenize", {"messages": MESSAGES, **nothing}).json() == plain


def test_an_unknown_model_is_not_found(post):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        response = post(path, {**body, "model": "huge"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["", "hé 🙂 日本", "<eos>", "\x00\n"])
def test_detokenize_reverses_tokenize(post, text):
    tokens = post("/tokenize", {"prompt": text}).json()["tokens"]
    assert post("/detokenize", {"tokens": tokens}).json() == {"prompt": text, "content": text}


def test_special_tokens_have_text(post):
    tokens = [*post("/tokenize", {"prompt": "a"}).json()["tokens"], 256]
    assert post("/detokenize", {"tokens": tokens}).json() == {
        "prompt": "a<eos>",
        "content": "a<eos>",
    }


@pytest.mark.parametrize("token", [-1, 260, 2**31, 2**63, 10**40, 1.5, True, "1", None])
def test_what_is_no_token_is_refused(post, token):
    error = error_of(post("/detokenize", {"tokens": [97, token]}))
    assert error["param"] in ("tokens", "tokens.1")


def test_long_answers_are_whole(post, byte_tokenizer):
    text = "abcdé" * 4000
    answer = post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == byte_tokenizer.encode(text)
    assert "".join(answer["token_strs"]).count("\ufffd") == 8000
    assert post("/detokenize", {"tokens": answer["tokens"]}).json() == {
        "prompt": text,
        "content": text,
    }


def test_bounds(post):
    assert error_of(post("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}))["param"] == "prompt"
    assert error_of(post("/detokenize", {"tokens": [97] * ((1 << 18) + 1)}))["param"] == "tokens"


@pytest.mark.timing
def test_the_loop_goes_on_while_a_large_text_is_tokenized(
    fake_engine, create_service, create_test_app
):
    app = create_test_app(tokenization.create_router(create_service(fake_engine)))
    text = "all work and no play " * 45_000

    async def longest_stall() -> float:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = httpx.Request("POST", "http://test/tokenize", json={"prompt": text}).content
            headers = {"content-type": "application/json"}
            task = asyncio.create_task(client.post("/tokenize", content=content, headers=headers))
            longest = 0.0
            while not task.done():
                before = time.process_time()
                await asyncio.sleep(0.001)
                longest = max(longest, time.process_time() - before)
            response = task.result()
        assert response.json()["count"] == len(text)
        return longest

    # In CPU time: another process may have the machine meanwhile.
    assert any(asyncio.run(longest_stall()) < python_seconds(1e6) for _ in range(3))


def test_llama_cpps_words(post, byte_tokenizer):
    def ask(path, **body):
        response = post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    ids = byte_tokenizer.encode("aé")
    special = byte_tokenizer.token_text(256)
    assert ask("/tokenize", content="aé")["tokens"] == ids
    assert ask("/tokenize", content=special)["tokens"] == [256]
    assert ask("/tokenize", content=special, parse_special=False)["tokens"] != [256]
    pieces = ask("/tokenize", content="aé", with_pieces=True)["tokens"]
    assert pieces == [
        {"id": ids[0], "piece": "a"},
        {"id": ids[1], "piece": [0xC3]},
        {"id": ids[2], "piece": [0xA9]},
    ]
    assert ask("/detokenize", tokens=ids) == {"prompt": "aé", "content": "aé"}


def test_openapi_describes_both_forms(fake_engine, create_service, create_test_app):
    app = create_test_app(tokenization.create_router(create_service(fake_engine)))
    schemas = app.openapi()["components"]["schemas"]
    assert {"TokenizeTextRequest", "TokenizeChatRequest", "TokenizeResponse"} <= set(schemas)
    assert len(schemas["TokenizeRequest"]["oneOf"]) == 3
