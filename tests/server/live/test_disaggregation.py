"""Prompts that are computed by one replica, and answered by others."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from streamed_answers import BODIES, content_of, states, until_states

SLOW = 201  # a token of prompts whose steps take longer
# Prompts of some blocks; the last tokens are in none.
PROMPTS = [[*range(3, 190)], [*range(40, 140), *range(40, 120)], [7, 9, 11] * 50, [*range(60, 180)]]
ROLES = ("--data-parallel-size", "3", "--prefill-replicas", "1", "--max-local-prefill-length", "20")
REPLICAS = 3


def bodies() -> list[dict[str, Any]]:
    return [
        {
            **body,
            "prompt": PROMPTS[index % len(PROMPTS)],
            "max_tokens": 60,
            "min_tokens": body.get("min_tokens", 0) // 5,
        }
        for index, body in enumerate(BODIES)
    ]


def varied(first: int, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests with prompts that have nothing in common."""
    return [
        {**BODIES[1], "prompt": [number, *range(90, 190)], "max_tokens": 20, "n": 1, **fields}
        for number in range(first, first + count)
    ]


# Requests that end with their first token, or nearly, or are not handed over.
SPECIAL: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 1, "n": 3, "seed": 5, "temperature": 1.0},
    {"max_tokens": 2, "logprobs": 3},
    {"max_tokens": 6, "prompt": [*range(3, 253)]},  # all of the context
    {"max_tokens": 20, "echo": True, "logprobs": 2},
    {"max_tokens": 20, "n": 2, "best_of": 4, "seed": 3, "temperature": 1.0},
    {"max_tokens": 20, "cache_salt": "tenant"},
]


def special(first_tokens: list[int], first_text: str) -> list[dict[str, Any]]:
    """Also those that are stopped by their first token, which is the same for all of them."""
    common = {"prompt": PROMPTS[0], "temperature": 0, "return_token_ids": True}
    stopped: list[dict[str, Any]] = [
        {"max_tokens": 30, "stop_token_ids": first_tokens[:1]},
        {"max_tokens": 30, "stop_token_ids": first_tokens[:1], "min_tokens": 3},
        *([{"max_tokens": 30, "stop": [first_text]}] if first_text else []),
    ]
    return [{**common, **one} for one in [*SPECIAL, *stopped]]


async def collected(server, body: dict[str, Any]) -> Any:
    answer = await server.ask("/v1/completions", body)
    found = answer.json()
    assert answer.status == 200, found
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return found["choices"], usage


async def answers(server, some: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(collected(server, body) for body in some))


@pytest.fixture(scope="module")
def alone(live_server, tiny_model):
    """What one engine answers."""
    with live_server(tiny_model) as server:
        body = {"prompt": PROMPTS[0], "temperature": 0, "return_token_ids": True, "max_tokens": 1}
        ((choice,), _) = server.run(collected(server, body))
        some = special(choice["token_ids"], choice["text"].strip("\ufffd"))
        yield {
            "streams": [content_of(server.run(server.complete(body))) for body in bodies()],
            "special": some,
            "collected": server.run(answers(server, some)),
            "varied": [content_of(server.run(server.complete(b))) for b in varied(3, 24)],
            "slow": [
                content_of(server.run(server.complete(b)))
                for b in varied(30, 4, max_tokens=4, prompt=[*range(3, 190), SLOW])
            ],
        }


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    with live_server(tiny_model, *ROLES) as server:
        yield server


async def streamed(server, some: list[dict[str, Any]]) -> list[Any]:
    streams = [await server.stream(body) for body in some]
    return [content_of(await stream.rest()) for stream in streams]


def transferred(server) -> float:
    return server.counter("prefix_cache_restored_tokens_total", place="peers")


def test_answers_are_those_of_one_engine(server, alone):
    for _ in range(2):  # and once more, from caches
        assert server.run(streamed(server, bodies())) == alone["streams"]
    assert transferred(server) > 300
    assert server.counter("routed_requests_total", replica="0") > 0


def test_what_ends_early_is_the_same(server, alone):
    assert server.run(answers(server, alone["special"])) == alone["collected"]


def test_short_prompts_are_computed_where_they_are_answered(server):
    def routed() -> list[float]:
        return [
            server.counter("routed_requests_total", replica=str(number))
            for number in range(REPLICAS)
        ]

    before = routed()
    server.run(answers(server, [{"prompt": [99, 98, 97, number] * 5} for number in range(6)]))
    after = routed()
    assert after[0] == before[0] and sum(after) == sum(before) + 6


def test_operators_see_roles(server):
    replicas = server.run(server.ask("/octavo/replicas")).json()["replicas"]
    assert [each["role"] for each in replicas] == ["prefill", "decode", "decode"]


def test_clients_that_leave_at_any_moment_leave_nothing(server):
    rng = random.Random(4)

    async def leave(body):
        stream = await server.stream(body)
        for _ in range(rng.randrange(4)):
            await stream.next()
        await asyncio.sleep(rng.random() * 0.01)
        await stream.close()

    async def main():
        await asyncio.gather(*(leave(body) for body in varied(30, 40, n=2)))

    server.run(main())
    server.wait_until_idle()
    load = server.load()
    assert load["num_running"] == load["num_waiting"] == 0
    assert server.counter("kv_blocks", state="used") == 0
    assert server.counter("invariant_violations_total") == 0


@pytest.fixture(scope="module")
def frail(live_server, tiny_model):
    """A server whose buffers hold a few blocks, and whose engines are given up soon."""
    flags = (*ROLES, "--resume-streams", "--kv-buffer-size", "80KiB", "--engine-timeout", "3")
    chunks = ("--max-num-batched-tokens", "64")
    with live_server(tiny_model, *flags, *chunks, faults={"slow": SLOW}) as server:
        yield server


def test_what_was_overwritten_is_computed(frail, alone):
    assert frail.run(streamed(frail, varied(3, 24))) == alone["varied"]
    assert frail.run(streamed(frail, bodies())) == alone["streams"]
    assert frail.counter("kv_transfer_bytes_total", what="sent") > 80 << 10


def slow_bodies() -> list[dict[str, Any]]:
    return varied(30, 4, max_tokens=4, prompt=[*range(3, 190), SLOW])


def pid_of(server, role: str) -> int:
    """Return an engine of a role: prefill replicas alone may write to the memory that all map."""

    def writes(pid: int) -> bool:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return any("octavo-kv" in line and "rw-s" in line for line in maps)

    return next(pid for pid in server.engine_pids() if writes(pid) == (role == "prefill"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_is_done_without(frail, alone, role, signum):
    async def main():
        await until_states(frail, ["ready"] * REPLICAS)
        victim = pid_of(frail, role)
        work = [
            asyncio.create_task(streamed(frail, some))
            for some in (slow_bodies(), varied(3, 24), bodies())
        ]
        await asyncio.sleep(0.3)
        os.kill(victim, signum)
        found = await asyncio.gather(*work)
        await until_states(frail, ["ready"] * REPLICAS)
        return found

    slow, many, streams = frail.run(main())
    assert slow == alone["slow"] and many == alone["varied"] and streams == alone["streams"]
    frail.wait_until_idle()
    assert frail.counter("kv_blocks", state="used") == 0
    assert frail.counter("invariant_violations_total") == 0


def test_without_prefill_replicas_others_compute_prompts(frail, alone):
    async def main():
        answer = await frail.ask("/octavo/replicas", {"action": "remove", "replica": 0})
        assert answer.status == 202, answer
        found = await streamed(frail, bodies())
        return found, await states(frail)

    found, left = frail.run(main())
    assert found == alone["streams"] and "ready" in left


def test_a_server_leaves_nothing_behind(frail):
    pids = [frail.pid, *frail.engine_pids()]
    frail.stop()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
