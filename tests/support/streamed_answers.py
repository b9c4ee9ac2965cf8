"""Requests whose streamed answers depend on all that an engine which goes on with them has to know;
and what a client sees of such a stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any

# Answers that depend on all that an engine which goes on has to know.
STREAMS: list[dict[str, Any]] = [
    {"prompt": "greedy", "max_tokens": 200, "temperature": 0, "logprobs": 2},
    {"prompt": "seeded", "max_tokens": 200, "seed": 7, "temperature": 0.9, "top_p": 0.9, "n": 3},
    {"prompt": "penalties", "max_tokens": 200, "seed": 8, "presence_penalty": 1.0,
     "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"prompt": "stops", "max_tokens": 200, "seed": 9, "stop": ["zz", "q!"], "min_tokens": 150},
    {"prompt": "bad words", "max_tokens": 200, "seed": 10, "bad_words": ["e", "ab"]},
    {"prompt": "logprobs", "max_tokens": 180, "seed": 11, "min_tokens": 30, "logprobs": 0},
    {"prompt": "grammar", "max_tokens": 200, "seed": 12, "guided_regex": "([ab]{9} ){15}end",
     "n": 2},
]  # fmt: skip
BODIES = [
    {
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **one,
    }
    for one in STREAMS
]


def content_of(stream) -> Any:
    """All that a client sees of a stream, but for times, and which event brought what."""
    assert not stream.errors and stream.is_whole, stream.events[-1:]
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    ends = {}
    for choice in stream.choices:
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if choice.get("logprobs"):
            logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            ends[index] = (choice["finish_reason"], choice.get("stop_reason"))
    usage = {name: stream.usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return texts, ids, logprobs, ends, usage


async def states(server) -> list[str]:
    answer = await server.ask("/octavo/replicas")
    return [each["state"] for each in answer.json()["replicas"]]


async def until_states(server, wanted, seconds=60.0):
    deadline = time.monotonic() + seconds
    while (found := await states(server)) != wanted:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)
