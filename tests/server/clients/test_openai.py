"""The ``openai`` package against a live server: its models, errors, retries, streams and helpers.

test_openai_fields.py has what the fields of requests do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODEL = "smollm2-135m"
NUM_BLOCKS = 2048
HELLO = [{"role": "user", "content": "Hello!"}]
SLOW, POISON = [187], [186]  # prompts of the tiny server
TINY = {"model": "tiny", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(openai, tiny_server) -> Iterator[Any]:
    url, key = tiny_server.base_url, "openai-key"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client


# -- models, ids and helpers --------------------------------------------------------------------


def test_models(openai, client, tiny) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "octavo")
    assert model.max_model_len == 8192
    assert client.models.retrieve(MODEL) == model
    assert [model.id for model in tiny.models.list()] == ["tiny", "team/tiny-too"]
    assert tiny.models.retrieve("team/tiny-too").id == "team/tiny-too"
    answer = tiny.completions.create(**TINY | {"model": "team/tiny-too"}, prompt="Hi")
    assert answer.model == "team/tiny-too"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_request_ids(openai, client) -> None:
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    raw = client.chat.completions.with_raw_response.create(
        **fields, extra_headers={"X-Request-Id": "ticket-17"}
    )
    assert raw.headers["x-request-id"] == "ticket-17"
    answer = raw.parse()
    assert answer._request_id == "ticket-17" and answer.id == "chatcmpl-ticket-17"
    ids = {client.chat.completions.create(**fields)._request_id for _ in range(3)}
    assert len(ids) == 3 and None not in ids
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields | {"messages": []})
    assert caught.value.request_id


def test_answers_say_what_made_them(client) -> None:
    before = int(time.time())
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert before <= answer.created <= time.time() and answer.system_fingerprint
    assert answer.timings["predicted_n"] == 3 and answer.timings["prompt_n"] > 0
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.refusal is None


def test_stream_helper(client) -> None:
    """The package's own idea of what a stream adds up to."""
    fields = {"model": MODEL, "messages": HELLO, "temperature": 0, "n": 2}
    fields |= {"logprobs": True, "top_logprobs": 1, "stop": ["!", "."]}
    whole = client.chat.completions.create(**fields)
    options = {"include_usage": True}
    with client.chat.completions.stream(**fields, stream_options=options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    for one, other in zip(final.choices, whole.choices, strict=True):
        assert one.message.content == other.message.content
        assert one.finish_reason == other.finish_reason
        assert one.logprobs.model_dump() == other.logprobs.model_dump()


def test_helpers_for_structured_output(openai, client) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        is_capital: bool
        districts: list[Annotated[str, Field(max_length=9)]] = Field(max_length=2)

    fields = {"model": MODEL, "messages": HELLO, "response_format": City, "temperature": 0}
    choice = client.chat.completions.parse(**fields).choices[0]
    assert isinstance(choice.message.parsed, City) and choice.finish_reason == "stop"
    with client.chat.completions.stream(**fields) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == choice.message.content
    assert final.choices[0].message.parsed == choice.message.parsed

    class Endless(BaseModel):
        inner: Endless

    with pytest.raises(openai.BadRequestError, match="without end") as caught:
        client.chat.completions.parse(**fields | {"response_format": Endless})
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**fields, max_tokens=2)


def test_answers_are_valid_whatever_is_drawn(client) -> None:
    """Requests are made as instructor makes them: it asks again if pydantic refuses an answer."""
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(pattern="^[A-Z][a-z]{1,9}$")
        age: int = Field(ge=0, le=120)
        kind: Literal["friend", "stranger"]

    schema = {"name": "Person", "schema": Person.model_json_schema(), "strict": True}
    for seed in range(8):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Who are you?"}],
            response_format={"type": "json_schema", "json_schema": schema},
            temperature=1.5,
            seed=seed,
        )
        Person.model_validate_json(answer.choices[0].message.content)


def test_a_template_without_tools_is_told_of_them_in_words(openai, client) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    tool = openai.pydantic_function_tool(City)  # the template has no place for it
    asked = {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason in ("tool_calls", "length") and not choice.message.content


def test_half_a_character_is_named_by_its_bytes(client, tokenizer) -> None:
    first, *others = tokenizer.encode("🦄")
    assert others
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=2,
        logprobs=True,
        extra_body={"allowed_token_ids": [first]},
    )
    for entry in answer.choices[0].logprobs.content:
        assert bytes(entry.bytes) == tokenizer.token_bytes(first)
        assert entry.token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def test_async_answers_at_once_are_the_answers_alone(openai, client, server) -> None:
    prompts = [f"{number} is a number that" for number in range(12)]
    fields = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(**fields, prompt=one).choices[0].text for one in prompts]

    async def ask(many, prompt: str) -> str:
        stream = await many.completions.create(**fields, prompt=prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as many:
            assert [model.id async for model in many.models.list()] == [MODEL]
            return await asyncio.gather(*(ask(many, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == alone


# -- fields that a tiny model shows better ------------------------------------------------------


def test_special_tokens_of_completions(tiny) -> None:
    def prompt_token_ids(**fields: Any) -> list[int]:
        extra = {"return_token_ids": True, **fields}
        answer = tiny.completions.create(**TINY, prompt="Hi", extra_body=extra)
        return answer.choices[0].prompt_token_ids

    bos, *text = prompt_token_ids()
    assert bos == 257 and len(text) == 2
    assert prompt_token_ids(add_special_tokens=True) == [bos, *text]
    assert prompt_token_ids(add_special_tokens=False) == text


def test_prompts_that_are_too_long(openai, tiny) -> None:
    text = "".join(map(str, range(200)))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
        tiny.completions.create(**TINY, prompt=text)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="lower max_tokens"):
        tiny.completions.create(**TINY | {"max_tokens": 255}, prompt="Hi")
    extra = {"truncate_prompt_tokens": -1}
    answer = tiny.completions.create(**TINY, prompt=text, extra_body=extra, echo=True)
    assert answer.usage.prompt_tokens == 254 and answer.choices[0].text.startswith(text[-254:])


def test_templates_of_requests_need_trust(openai, tiny) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.chat.completions.create(**TINY, messages=HELLO, extra_body={"chat_template": "Hi"})
    assert caught.value.param == "chat_template"


def test_priority(tiny, tiny_server) -> None:
    ends: list[str] = []

    def ask(name: str, priority: int, max_tokens: int) -> None:
        extra = {"priority": priority, "ignore_eos": True}
        fields = TINY | {"prompt": SLOW, "max_tokens": max_tokens}
        tiny.completions.create(**fields, extra_body=extra)
        ends.append(name)

    jobs = [("first", 0, 24), ("low", 3, 2), ("high", -(2**31) + 1, 2)]
    threads = [threading.Thread(target=ask, args=job) for job in jobs]
    for number, thread in enumerate(threads):  # one runs, and two wait
        thread.start()
        tiny_server.wait_for_load(lambda load, n=number: load["server_load"] == n + 1)
    for thread in threads:
        thread.join()
    assert ends == ["first", "high", "low"]


# -- errors -------------------------------------------------------------------------------------


def test_errors_have_their_classes(openai, client, tiny) -> None:
    ask = client.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=MODEL, prompt="Hi", temperature="warm")
    error = caught.value
    assert error.status_code == 400 and error.type == "invalid_request_error"
    assert error.param == "temperature" and "should be a valid number" in error.message

    with pytest.raises(openai.NotFoundError) as caught:
        ask(model="gpt-5", prompt="Hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model=MODEL, input="Hi")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model=MODEL, input="Hi")

    with pytest.raises(openai.AuthenticationError) as caught:
        tiny.with_options(api_key="wrong-key").completions.create(**TINY, prompt="Hi")
    assert caught.value.status_code == 401 and caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"].startswith("Bearer")

    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            ask(model=MODEL, prompt="Hi", extra_headers=headers)
        assert caught.value.type == "permission_error"

    with pytest.raises(openai.APIStatusError) as caught:
        ask(model=MODEL, prompt="Hi" * (5 << 20))
    assert caught.value.status_code == 413


@pytest.mark.parametrize("streams", [False, True])
def test_engine_errors_are_of_one_request(openai, tiny, streams) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        tiny.completions.create(**TINY, prompt=POISON, stream=streams)
    assert caught.value.status_code == 500 and caught.value.type == "server_error"
    assert (
        "poisoned" not in caught.value.message
    )  # what happened inside is not the client's business
    assert tiny.completions.create(**TINY, prompt="Hi").usage.completion_tokens == 2


# -- overload -----------------------------------------------------------------------------------


def test_retries_after_a_rate_limit(openai, tiny_server) -> None:
    """The package's own retries are enough, because they are told when."""
    url = tiny_server.base_url
    fields = {**TINY, "prompt": "Hi", "max_tokens": 1}
    with openai.OpenAI(base_url=url, api_key="hasty-key") as client:
        impatient = client.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            for _ in range(1000):
                impatient.completions.create(**fields)
        headers = caught.value.response.headers
        assert caught.value.code == "rate_limit_exceeded"
        assert headers["retry-after"] == "1" and headers["x-should-retry"] == "true"
        assert 0 < int(headers["retry-after-ms"]) <= 600  # 100 a minute
        raw = client.completions.with_raw_response.create(**fields)
        assert raw.retries_taken == 1 and raw.parse().usage.completion_tokens == 1
        # Another key's requests were none of these.
        other = client.with_options(api_key="openai-key", max_retries=0)
        assert other.completions.create(**fields).usage.completion_tokens == 1


def test_retries_after_a_full_queue(openai, tiny_server) -> None:
    async def ask() -> int:
        options = {"base_url": tiny_server.base_url, "api_key": "openai-key"}
        async with openai.AsyncOpenAI(**options) as client:
            impatient = client.with_options(max_retries=0)
            slow = {**TINY, "max_tokens": 200, "prompt": SLOW, "stream": True}
            slow["extra_body"] = {"ignore_eos": True}
            blocking = await impatient.completions.create(**slow)
            waiting = [asyncio.create_task(impatient.completions.create(**slow)) for _ in range(2)]
            while tiny_server.load()["server_load"] < 3:
                await asyncio.sleep(0.01)

            with pytest.raises(openai.InternalServerError) as caught:
                await impatient.completions.create(**TINY, prompt="Hi")
            assert caught.value.status_code == 503 and caught.value.type == "overloaded_error"
            headers = caught.value.response.headers
            assert int(headers["retry-after"]) >= 1 and headers["x-should-retry"] == "true"

            patient = asyncio.create_task(
                client.completions.with_raw_response.create(**TINY, prompt="Hi")
            )
            await asyncio.sleep(0.3)  # it was refused, and waits as it was told
            await blocking.close()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            raw = await patient
            assert raw.parse().usage.completion_tokens == 2
            return raw.retries_taken

    assert asyncio.run(ask()) >= 1
    tiny_server.wait_until_idle()


def test_a_burst_is_served_with_retries(openai, tiny_server) -> None:
    """Twice as many as may wait; no client notices."""

    async def ask() -> int:
        options = {"base_url": tiny_server.base_url, "api_key": "openai-key"}
        async with openai.AsyncOpenAI(**options) as client:
            ask = client.completions.with_raw_response.create
            fields = TINY | {"prompt": SLOW, "max_tokens": 1}
            answers = await asyncio.gather(*(ask(**fields) for _ in range(4)))
        assert all(answer.parse().usage.completion_tokens for answer in answers)
        return sum(answer.retries_taken for answer in answers)

    assert asyncio.run(ask()) >= 1


# -- cancellation -------------------------------------------------------------------------------

ENDLESS = {"model": MODEL, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def test_closing_a_stream_frees_its_blocks(client, server) -> None:
    server.wait_until_idle()
    for num_chunks in (1, 20):
        with client.chat.completions.create(**ENDLESS, messages=HELLO, n=2, stream=True) as stream:
            for _ in range(num_chunks):
                next(stream)
            server.wait_for_load(lambda load: load["num_running"] == 2)
            assert server.load()["num_used_blocks"] > 0
        server.wait_until_idle()
    load = server.load()
    assert load["num_free_blocks"] + load["num_cached_blocks"] == NUM_BLOCKS


def test_giving_up_a_whole_answer_frees_its_blocks(openai, server) -> None:
    async def give_up() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            asking = asyncio.create_task(client.completions.create(**ENDLESS, prompt="Hi"))
            while not server.load()["num_used_blocks"]:
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while server.load()["num_used_blocks"]:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.APITimeoutError):  # the package's own, of the connection
                patience = client.with_options(timeout=0.3, max_retries=0)
                await patience.completions.create(**ENDLESS, prompt="Hi")

    asyncio.run(asyncio.wait_for(give_up(), 60))
    server.wait_until_idle()
