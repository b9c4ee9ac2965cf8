"""Prompts that are computed by one replica, and answered by another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from streamed_answers import BODIES, content_of

# Prompts of some blocks, whose ends are in no block.
LONG = [[*range(3, 190)], [*range(40, 140), *range(40, 120)], [7, 9, 11] * 50, [*range(60, 180)]]
ROLES = ("--data-parallel-size", "3", "--prefill-replicas", "1", "--max-local-prefill-length", "20")


def bodies() -> list[dict[str, Any]]:
    return [
        {
            **body,
            "prompt": LONG[index % len(LONG)],
            "max_tokens": 60,
            "min_tokens": body.get("min_tokens", 0) // 5,
        }
        for index, body in enumerate(BODIES)
    ]


@pytest.fixture(scope="module")
def alone(live_server, tiny_model):
    """What one engine answers."""
    with live_server(tiny_model) as server:
        yield [content_of(server.run(server.complete(body))) for body in bodies()]


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    with live_server(tiny_model, *ROLES) as server:
        yield server


def test_answers_are_those_of_one_engine(server, alone):
    async def main():
        streams = [await server.stream(body) for body in bodies()]
        return await asyncio.gather(*(stream.rest() for stream in streams))

    assert [content_of(stream) for stream in server.run(main())] == alone
    assert [content_of(server.run(server.complete(body))) for body in bodies()] == alone
