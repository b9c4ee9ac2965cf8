"""What a stream adds up to is the whole answer, and what the offline API says.

100 requests, chat and completions, greedy and sampled, in many scripts: each is sent as a stream
and as a whole, many at once, and answered offline as well.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from octavo import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MAX_TOKENS = 12
CONCURRENT = 24

TEXTS = [
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM users\nWHERE",
    '<div class="a">\n\t<p>',
    '{"name": "Ann", "tags": ["x", "y"],',
    "Übermäßig schöne Grüße aus",
    "Où est la bibliothèque ? Elle est",
    "¿Dónde está el niño? Está en",
    "Москва — столица",
    "Η Αθήνα είναι",
    "東京は日本の",
    "我喜歡喝茶，因為",
    "서울은 대한민국의",
    "مرحبا بالعالم، اليوم",
    "שלום עולם, היום",
    "नमस्ते दुनिया, आज",
    "สวัสดีชาวโลก วันนี้",
    "🦄🌈✨ and then 🎉",
    "👩‍👩‍👧‍👦 is a family, 🏳️‍🌈 is",
    "🇫🇷🇯🇵🇧🇷 flags:",
    "x² + y² ≤ √2 · π ⇒",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕚𝕤",
    "e\u0301 is not é, and n\u0303",
    "Tab\tand\r\nline\n\n\n   spaces",
    "<|im_start|>user\nnot a role<|im_end|>",
]
# Bytes that make up characters: with nothing else to say, a model splits them everywhere.
MIXED = "🦄語é👩‍👧ñ🎉한ş𝔘 ☃"


@dataclass
class Case:
    """One request, and what came back: a text and tokens each."""

    path: str
    fields: dict[str, Any]
    whole: tuple[str, list[int]] = ("", [])
    stream: tuple[str, list[int]] = ("", [])
    pieces: list[str] = field(default_factory=list)


def create_cases(tokenizer) -> list[Case]:
    """Every text for both routes, greedy and sampled, 25 · 2 · 2; in chats with a request to repeat
    it, as their answers would seldom have characters of other scripts."""
    halves = [i for i in tokenizer.encode(MIXED) if "�" in tokenizer.decode([i])]
    assert len(set(halves)) > 10
    cases = []
    for number, text in enumerate(TEXTS):
        asked = {"role": "user", "content": f"Please repeat after me: {text}"}
        for path, where in (
            ("completions", {"prompt": text}),
            ("chat/completions", {"messages": [asked]}),
        ):
            hot = {"temperature": 1.2, "seed": number}
            if number % 5 == 0:  # halves of characters only, which seldom make a whole
                hot |= {"allowed_token_ids": halves}
            elif number % 5 == 1:
                hot |= {"temperature": 2.0, "repetition_penalty": 1.3, "top_k": 200}
            cases += [Case(path, where | {"temperature": 0}), Case(path, where | hot)]
    return cases


async def ask(client: httpx.AsyncClient, case: Case) -> None:
    body = case.fields | {"max_tokens": MAX_TOKENS, "return_token_ids": True}
    answer = await client.post(case.path, json=body)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    case.whole = text_of(choice), choice["token_ids"]

    token_ids: list[int] = []
    async with client.stream("POST", case.path, json=body | {"stream": True}) as response:
        response.raise_for_status()
        events = [line async for line in response.aiter_lines() if line]
    assert events.pop() == "data: [DONE]"
    for event in events:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        case.pieces.append(text_of(choice))
        token_ids += choice.get("token_ids", [])
    case.stream = "".join(case.pieces), token_ids


def text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta")
    return choice["text"] if message is None else message.get("content") or ""


@pytest.fixture(scope="module")
def cases(server, tokenizer) -> list[Case]:
    """All of them, answered."""
    cases = create_cases(tokenizer)
    assert len(cases) == 100

    async def ask_all() -> None:
        limits = httpx.Limits(max_connections=CONCURRENT)
        base_url = server.base_url + "/"
        async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=120) as client:
            await asyncio.gather(*(ask(client, case) for case in cases))

    asyncio.run(ask_all())
    return cases


def test_streams_add_up_to_whole_answers(cases) -> None:
    for case in cases:
        assert case.stream == case.whole, case.fields
        assert len(case.whole[1]) <= MAX_TOKENS
    assert sum(len(case.pieces) > 3 for case in cases) > 75  # they were streams indeed


def test_no_character_is_split(cases, tokenizer) -> None:
    """A U+FFFD is there only where the tokens as a whole have no character."""
    num_invalid = 0
    for case in cases:
        text, token_ids = case.whole
        # A character that ``max_tokens`` cuts off is not shown.
        assert tokenizer.decode(token_ids) in (text, text + "�"), case.fields
        bytes_of_all = b"".join(
            tokenizer.token_bytes(i) for i in token_ids if not tokenizer.is_special(i)
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert text == decoder.decode(bytes_of_all), case.fields
        num_invalid += "�" in tokenizer.decode(token_ids)
    assert num_invalid  # else this has shown nothing
    assert any(ord(char) > 0xFFFF for case in cases for char in case.whole[0])


def test_answers_are_those_of_the_offline_api(cases) -> None:
    """With a seed, those that were sampled, too."""
    cases = sorted(cases, key=lambda case: "messages" in case.fields)  # stable
    prompts = [case.fields["prompt"] for case in cases if "prompt" in case.fields]
    conversations = [case.fields["messages"] for case in cases if "messages" in case.fields]
    params = [
        SamplingParams(
            **{key: case.fields[key] for key in case.fields if key not in ("prompt", "messages")},
            max_tokens=MAX_TOKENS,
        )
        for case in cases
    ]
    with LLM("smollm2-135m", max_model_len=512, num_blocks=1024) as llm:
        outputs = llm.generate(prompts, params[: len(prompts)])
        outputs += llm.chat(conversations, params[len(prompts) :])
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert case.whole == (completion.text, completion.token_ids), case.fields
