"""A request can only fail itself: each of these is sent beside healthy streams, which must not
notice it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

# The tiny model's: tests/conftest.py.
CONTEXT, VOCAB, EOS = 256, 260, 256
RAISE = 199  # a step with a prompt that holds this token raises
NAN = 198  # the rows of a prompt that holds this token have no valid numbers

# A template that does as much as a request tells it to.
TEMPLATE = """
{%- for i in range(rows | default(1)) %}{% for j in range(columns | default(1)) %}
{%- for message in messages %}{{ message.content * (times | default(1)) }}{% endfor %}
{%- endfor %}{% endfor %}"""

HEALTHY = [
    {
        "prompt": f"healthy stream {number}",
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    for number in range(8)
]


@dataclass
class Poison:
    """A request, and what may come of it. ``body``: JSON, or bytes as they are sent."""

    name: str
    body: Any
    statuses: tuple[int, ...] = (400,)
    path: str = COMPLETIONS
    leaves: bool = False  # without having read anything
    headers: dict[str, str] = field(default_factory=dict)


def completion(name: str, *statuses: int, **fields: Any) -> Poison:
    return Poison(name, {"prompt": "abc", **fields}, statuses or (400,))


def chat(name: str, *statuses: int, content: Any = "abc", **fields: Any) -> Poison:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    return Poison(name, body, statuses or (400,), CHAT)


def raw(name: str, body: bytes, *statuses: int) -> Poison:
    return Poison(name, body, statuses or (400,))


POISONS = [
    # Numbers beyond their bounds.
    completion("n 0", n=0),
    completion("n 129", n=129),
    completion("n 2^63", n=2**63),
    completion("n is true", n=True),
    completion("n is 1.5", n=1.5),
    completion("n is text", n="1"),
    completion("best_of below n", n=4, best_of=2),
    completion("max_tokens -2", max_tokens=-2),
    completion("max_tokens 2^31", max_tokens=2**31),
    completion("max_tokens 2^31 - 1", max_tokens=2**31 - 1),
    completion("min_tokens above max_tokens", min_tokens=20, max_tokens=10),
    completion("temperature -0.1", temperature=-0.1),
    completion("temperature 1e308", temperature=1e308),
    completion("temperature 5e-324", 200, temperature=5e-324),
    completion("top_p 0", top_p=0),
    completion("top_p 5e-324", 200, top_p=5e-324),
    completion("top_k -2", top_k=-2),
    completion("min_p 1.1", min_p=1.1),
    completion("presence_penalty 2.1", presence_penalty=2.1),
    completion("repetition_penalty 0", repetition_penalty=0),
    completion("repetition_penalty 5e-324", repetition_penalty=5e-324),
    completion(
        "all penalties at once",
        200,
        repetition_penalty=1000,
        presence_penalty=-2,
        frequency_penalty=-2,
        temperature=2,
        max_tokens=40,
    ),
    completion("seed 2^64", seed=2**64),
    completion("seed 2^64 - 1", 200, seed=2**64 - 1),
    completion("logprobs 21", logprobs=21),
    completion("prompt_logprobs 2^31", prompt_logprobs=2**31),
    completion("timeout 0", timeout=0),
    completion("timeout of a microsecond", 504, timeout=1e-6, max_tokens=100),
    completion("priority -2^31 + 1", 200, priority=-(2**31) + 1),
    completion("priority -2^40", priority=-(2**40)),
    # Numbers that are none.
    raw("NaN", b'{"prompt": "a", "temperature": NaN}'),
    raw("Infinity", b'{"prompt": "a", "top_p": Infinity}'),
    raw("1e999", b'{"prompt": "a", "temperature": 1e999}'),
    raw("an integer of 10,000 digits", b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}"),
    # Tokens that do not exist, or are all forbidden.
    completion("logit_bias out of the vocabulary", logit_bias={str(VOCAB): 1}),
    completion("logit_bias of a negative token", logit_bias={"-1": 1}),
    completion("logit_bias of a word", logit_bias={"the": 1}),
    completion("logit_bias 100.1", logit_bias={"1": 100.1}),
    completion("logit_bias -100 for all", 200, logit_bias={str(i): -100 for i in range(VOCAB)}),
    completion("allowed_token_ids out of the vocabulary", allowed_token_ids=[VOCAB]),
    completion("stop_token_ids out of the vocabulary", stop_token_ids=[2**31 - 1]),
    completion("nothing is allowed", allowed_token_ids=[32], bad_words=["A"]),
    completion(
        "only the end is allowed, and not yet",
        allowed_token_ids=[EOS],
        min_tokens=8,
        max_tokens=8,
    ),
    completion("prompt out of the vocabulary", prompt=[1, VOCAB]),
    completion("negative token in the prompt", prompt=[1, -1]),
    completion("text among tokens", prompt=[1, "a"]),
    # Lengths.
    completion("empty prompt", prompt=""),
    completion("no prompts", prompt=[]),
    completion("an empty prompt among others", prompt=["a", ""]),
    completion("an empty list among prompts", prompt=[[1], []]),
    completion("257 prompts", prompt=["a"] * 257),
    completion("256 prompts", 200, prompt=["a"] * 256, max_tokens=1),
    completion("context - 1", 200, prompt=[1] * (CONTEXT - 1), max_tokens=1),
    completion("context", prompt=[1] * CONTEXT, max_tokens=1),
    completion("context + 1", prompt=[1] * (CONTEXT + 1), max_tokens=1),
    completion("one token too many", prompt=[1] * 100, max_tokens=CONTEXT - 99),
    completion("to the last token", 200, prompt=[1] * 100, max_tokens=CONTEXT - 100),
    completion("cut to nothing", truncate_prompt_tokens=0),
    chat("no messages", messages=[]),
    chat("empty message", content=""),
    chat("no content", content=None),
    # As much as is allowed.
    completion("n 128", 200, n=128, max_tokens=2, logprobs=20),
    completion("best_of 128", 200, best_of=128, max_tokens=2),
    completion(
        "logprobs of everything",
        200,
        prompt=[1] * 200,
        max_tokens=50,
        logprobs=20,
        prompt_logprobs=20,
        echo=True,
    ),
    completion(
        "16 stop strings that nearly match",
        200,
        allowed_token_ids=[97],
        max_tokens=200,
        ignore_eos=True,
        stop=["a" * (100 + i) + "b" for i in range(16)],
    ),
    completion("17 stop strings", stop=[str(i) for i in range(17)]),
    completion("empty stop string", stop=[""]),
    completion("stop string of 5,000 characters", stop="x" * 5000),
    completion("129 bad words", bad_words=[str(i) for i in range(129)]),
    completion("logit_bias of 1,025 tokens", logit_bias={str(i): 1 for i in range(1025)}),
    # Bytes that are no text.
    completion("only 0xFF", 200, allowed_token_ids=[255], max_tokens=50, logprobs=1),
    completion(
        "half characters for ever",
        200,
        prompt=[0xE2, 0x82],
        allowed_token_ids=[0xF0],
        max_tokens=50,
    ),
    completion(
        "special tokens only",
        200,
        allowed_token_ids=[257],
        max_tokens=50,
        skip_special_tokens=False,
    ),
    raw("lone surrogate", rb'{"prompt": "\ud800", "stop": "\udfff"}', 200),
    raw("NUL", rb'{"prompt": "\u0000\u0000", "max_tokens": 2}', 200),
    raw("not UTF-8", b'{"prompt": "\xff\xfe"}'),
    # JSON.
    raw("100,000 levels", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    raw("100,000 levels, open", b'{"metadata": ' + b'{"a":' * 100_000),
    raw("a key twice", b'{"prompt": "a", "prompt": "b"}'),
    raw("no object", b"[]"),
    raw("nothing", b""),
    completion("a grammar", grammar="root ::= x"),
    completion("beam search", use_beam_search=True),
    # Templates.
    chat("rows * columns", chat_template_kwargs={"rows": 10**5, "columns": 10**5}),
    chat("10^9 rows", chat_template_kwargs={"rows": 10**9}),
    chat("a string * 10^9", chat_template_kwargs={"times": 10**9}),
    chat("a string * -1", chat_template_kwargs={"times": -1}),
    chat("rows of the wrong type", chat_template_kwargs={"rows": {"a": 1}}),
    chat("messages again", chat_template_kwargs={"messages": "x"}),
    chat("a template of its own", chat_template="{{ 1 }}"),
    chat("an image", content=[{"type": "image_url", "image_url": {"url": "http://x/"}}]),
    # Steps that raise.
    completion("raises", 500, prompt=[1, RAISE]),
    completion("not a number", 500, prompt=[1, NAN]),
    completion("not a number in a stream", 500, prompt=[2, NAN], stream=True),
    completion("raises, 8 times", 500, prompt=[2, RAISE], n=8),
    completion("raises in a stream", 500, prompt=[3, RAISE], stream=True),
    completion("raises beside a good prompt", 200, prompt=[[4, RAISE], [5]]),
    Poison("raises in /generate", {"prompt": [6, RAISE]}, (500,), GENERATE),
    # Clients that do not wait.
    Poison("left at once", {"prompt": "x", "max_tokens": 200, "n": 4}, leaves=True),
    Poison(
        "left a stream at once", {"prompt": "x", "max_tokens": 200, "stream": True}, leaves=True
    ),
    Poison("left at once, raising", {"prompt": [7, RAISE]}, leaves=True),
    completion("the same request id as others", 200, request_id="same", max_tokens=50),
]


@pytest.fixture(scope="module")
def server(live_server, tiny_model, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template))
    with live_server(tiny_model, *flags, faults={"raise": RAISE, "nan": NAN}) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server) -> list[list[int]]:
    """The tokens of the healthy streams, each alone on a server that has seen nothing else."""
    return [server.run(server.complete(body)).token_ids for body in HEALTHY]


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.name)
def test_it_fails_alone(server, expected, poison):
    engine = server.engine_pid
    streams = server.run(_send_beside_healthy_streams(server, poison))
    assert [stream.token_ids for stream in streams] == expected
    assert all(stream.finish_reasons == ["length"] for stream in streams)
    assert all(stream.num_done == 1 and stream.is_whole for stream in streams)
    assert server.engine_pid == engine
    assert server.load()["num_restarts"] == 0


def test_there_are_enough_of_them():
    assert len({poison.name for poison in POISONS}) == len(POISONS) >= 60


def test_nothing_is_left_after_all(server):
    load = server.wait_until_idle()
    assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)
    assert not [
        line
        for line in server.log
        if "damaged" in line or "unexpected" in line or "Error:" in line and "poisoned" not in line
    ]


async def _send_beside_healthy_streams(server, poison: Poison) -> list[Any]:
    streams = await asyncio.gather(*(server.stream(body) for body in HEALTHY))
    for stream in streams:
        await stream.next()  # all of them run
    if poison.leaves:
        await _send_and_leave(server, poison)
    else:
        answer = await server.ask(poison.path, poison.body, headers=poison.headers)
        assert answer.status in poison.statuses, answer.body
        assert answer.is_whole
        _check_end(answer)
    return await asyncio.gather(*(stream.rest() for stream in streams))


async def _send_and_leave(server, poison: Poison) -> None:
    _, writer = await server.open()
    writer.write(server.request(poison.path, poison.body))
    await writer.drain()
    writer.close()


def _check_end(answer: Any) -> None:
    """An error says so in OpenAI's form, and nothing of our insides."""
    if answer.status == 200:
        return
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["message"]
    text = json.dumps(answer.json())
    assert not any(word in text for word in ("Traceback", "0x", "/home", ".py", "RuntimeError"))
