"""``huggingface_hub.InferenceClient`` against a live server, as OpenAI's API and as TGI's."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "smollm2-135m"
HELLO = [{"role": "user", "content": "What is the capital of Japan?"}]
PROMPT = "The capital of France is"
SHORT = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def hub():
    return pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def client(hub, server):
    with hub.InferenceClient(base_url=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def tgi(hub, server):
    with hub.InferenceClient(model=server.url) as client:
        yield client


def test_chat(client) -> None:
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 7}
    answer = client.chat_completion(HELLO, **fields, logprobs=True, top_logprobs=2)
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.usage.completion_tokens == 7 and answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    options = {"include_usage": True}
    chunks = list(client.chat_completion(HELLO, **fields, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 7

    stopped = client.chat_completion(HELLO, **fields, stop=["Tokyo"])
    assert stopped.choices[0].message.content == text[: text.index("Tokyo")]
    hot = fields | {"temperature": 2.0, "seed": 1, "extra_body": {"top_k": 1}}
    # The same route, by the names of OpenAI's package.
    answer = client.chat.completions.create(messages=HELLO, **hot)
    assert answer.choices[0].message.content == text


def test_text_generation(tgi) -> None:
    text = tgi.text_generation(PROMPT, **SHORT)
    assert text.startswith(" Paris")
    full = tgi.text_generation(PROMPT, **SHORT, return_full_text=True)
    assert full == PROMPT + text
    assert tgi.text_generation(PROMPT, **SHORT, stop=["Paris"]) == " Paris"

    answer = tgi.text_generation(
        PROMPT, **SHORT, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert answer.generated_text == text
    details = answer.details
    assert details.finish_reason == "length" and details.generated_tokens == 8
    assert "".join(token.text for token in details.tokens) == text
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert [len(top) for top in details.top_tokens] == [2] * 8

    hot = {**SHORT, "do_sample": True, "temperature": 2.0}
    assert tgi.text_generation(PROMPT, **hot, seed=1, top_k=1) == text
    sampled = [tgi.text_generation(PROMPT, **hot, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    best = tgi.text_generation(PROMPT, **hot, best_of=2, seed=1, details=True)
    assert len(best.details.best_of_sequences) == 1


def test_text_generation_streams(hub, tgi, server) -> None:
    text = tgi.text_generation(PROMPT, **SHORT)
    assert "".join(tgi.text_generation(PROMPT, **SHORT, stream=True)) == text
    events = list(tgi.text_generation(PROMPT, **SHORT, stream=True, details=True))
    assert [event.index for event in events] == list(range(1, 9))
    assert "".join(event.token.text for event in events) == text == events[-1].generated_text
    assert events[-1].details.finish_reason == "length"
    assert events[-1].details.generated_tokens == 8

    async def ask() -> str:
        async with hub.AsyncInferenceClient(model=server.url) as client:
            stream = await client.text_generation(PROMPT, **SHORT, stream=True)
            return "".join([piece async for piece in stream])

    assert asyncio.run(ask()) == text


def test_structured_output(client, tgi) -> None:
    text = tgi.text_generation(PROMPT, grammar={"type": "regex", "value": "[xyz]{3}"})
    assert re.fullmatch("[xyz]{3}", text)
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    text = tgi.text_generation(PROMPT, grammar={"type": "json", "value": schema}, **SHORT)
    assert text.lstrip().startswith("{")
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat_completion(HELLO, model=MODEL, response_format=named, max_tokens=60)
    assert json.loads(answer.choices[0].message.content).keys() == {"yes"}


def test_errors(hub, client, tgi, tiny_server) -> None:
    from huggingface_hub.errors import HfHubHTTPError, ValidationError

    with pytest.raises(ValidationError, match="temperature"):
        tgi.text_generation(PROMPT, temperature=-1.0)
    with pytest.raises(ValidationError, match="parameters.grammar.value: unclosed group"):
        tgi.text_generation(PROMPT, grammar={"type": "regex", "value": "(a+"})
    with pytest.raises(HfHubHTTPError, match="model_not_found|does not exist") as caught:
        client.chat_completion(HELLO, model="gpt-5")
    assert caught.value.response.status_code == 404
    with (
        hub.InferenceClient(model=tiny_server.url, token="wrong-key") as stranger,
        pytest.raises(HfHubHTTPError) as caught,
    ):
        stranger.text_generation("Hi")
    assert caught.value.response.status_code == 401
    with hub.InferenceClient(model=tiny_server.url, token="huggingface-key") as friend:
        assert friend.text_generation("Hi", max_new_tokens=1) is not None
        with pytest.raises(HfHubHTTPError) as caught:
            for _ in range(1000):
                friend.text_generation("Hi", max_new_tokens=1)
    assert caught.value.response.status_code == 429
