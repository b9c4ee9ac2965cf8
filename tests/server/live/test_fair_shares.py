"""One client against the others: what it may ask for, how much of it, and whose turn it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

SLOW = 200  # a prompt with this token makes each step take longer
FLOOD, QUIET = "key-of-the-flood", "key-of-the-quiet"
ENDLESS = {"window": 16, "n": 4, "max_tokens": 2_000_000_000, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def plain_server(live_server, tiny_model):
    """As anybody starts one."""
    with live_server(tiny_model) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", **ENDLESS}),
        ("/v1/completions", {"prompt": "a", **ENDLESS, "stream": True, "attention_sinks": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, **ENDLESS}),
        ("/v1/chat/completions", {"messages": MESSAGES, "window": 16}),
        ("/generate", {"prompt": "a", "window": 16, "max_tokens": 2_000_000_000}),
    ],
)
def test_windows_are_the_operators_to_allow(plain_server, path, body):
    answer = plain_server.fetch(path, body)
    assert answer.status == 400 and answer.error["param"] == "window", answer
    assert "--allow-window" in answer.error["message"]
    assert plain_server.load()["num_running"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "n_predict": -1, "ignore_eos": True}),
        ("/completion", {"prompt": "a", "n_predict": 2_000_000_000, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1, "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True}),
    ],
)
def test_what_has_no_end_of_its_own_ends_with_the_context(plain_server, path, body):
    answer = plain_server.fetch(path, body)
    assert answer.status == 200, answer
    usage = answer.json().get("usage") or {"completion_tokens": answer.json()["tokens_predicted"]}
    (model,) = plain_server.fetch("/v1/models").json()["data"]
    assert usage["completion_tokens"] < model["max_model_len"]


def _predicted(answer: dict[str, Any]) -> int:
    return answer["tokens_predicted"]


def _counted(answer: dict[str, Any]) -> int:
    return answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def limited_server(live_server, tiny_model):
    flags = ("--max-output-tokens", "20", "--allow-window", "--max-work", "1000")
    flags += ("--max-unread-bytes", "300KB")
    with live_server(tiny_model, *flags) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 21}),
        ("/v1/completions", {"prompt": "a", **ENDLESS}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 21}),
        ("/generate", {"prompt": "a", "max_tokens": 21}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 21}}),
    ],
)
def test_an_answer_may_have_so_many_tokens(limited_server, path, body):
    answer = limited_server.fetch(path, body)
    assert answer.status in (400, 422), answer
    assert b"20" in answer.body and b"tokens" in answer.body


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/completion", {"prompt": "a", "n_predict": -1}, _predicted),
        ("/completion", {"prompt": "a", "n_predict": 99}, _predicted),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES},
            _counted,
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 20, "window": 8},
            _counted,
        ),
    ],
)
def test_who_says_nothing_of_it_gets_so_many(limited_server, path, body, count):
    answer = limited_server.fetch(path, {**body, "ignore_eos": True})
    assert answer.status == 200 and count(answer.json()) == 20, answer


def test_more_work_than_a_server_takes_is_no_work(limited_server):
    answer = limited_server.fetch("/v1/completions", {"prompt": "a", "max_tokens": 20, "n": 50})
    assert answer.status == 400 and "may be under way" in answer.error["message"]


@pytest.mark.parametrize(("n", "status"), [(1, 200), (10, 503)])
def test_what_an_answer_takes_in_memory_is_bounded(limited_server, n, status):
    body = {"messages": MESSAGES, "n": n, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    answer = limited_server.fetch("/v1/chat/completions", body)
    assert answer.status == status, answer
    assert limited_server.fetch("/v1/completions", {"prompt": "a"}).status == 200


# -- keys ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_at_once(live_server, tiny_model):
    flags = ("--api-key", FLOOD, "--api-key", QUIET, "--max-concurrent-per-key", "1")
    flags += ("--max-work-per-key", "100")
    with live_server(tiny_model, *flags, key=FLOOD) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 8}),
        ("/v1/completions", {"prompt": "a", "best_of": 8}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 8, "max_tokens": 2}),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 100}),
    ],
)
def test_limits_of_a_key_count_work(one_at_once, path, body):
    answer = one_at_once.fetch(path, body)
    assert answer.status in (400, 422), answer
    assert one_at_once.fetch("/v1/completions", {"prompt": "a"}).status == 200


@pytest.fixture(scope="module")
def two_slots(live_server, tiny_model):
    flags = ("--api-key", FLOOD, "--api-key", QUIET)
    flags += ("--max-num-seqs", "2", "--max-queued-requests", "16")
    with live_server(tiny_model, *flags, faults={"slow": SLOW}, key=FLOOD) as server:
        yield server


def test_a_flood_keeps_nobody_else_waiting(two_slots):
    """The queue is full of one key's samples when another key comes: it is let in, and its answers
    are there when few of the others are."""
    server = two_slots
    body = {"prompt": [SLOW, 1], "max_tokens": 3, "temperature": 0, "ignore_eos": True}

    async def main() -> list[str]:
        ended: list[str] = []

        async def ask(name: str, key: str, **fields: Any) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await server.ask("/v1/completions", {**body, **fields}, headers=headers)
            assert answer.status == 200, answer
            ended.append(name)

        flood = [asyncio.create_task(ask("flood", FLOOD, n=2)) for _ in range(8)]
        async with asyncio.timeout(30):
            while (await server.ask("/load")).json()["num_waiting"] < 10:
                await asyncio.sleep(0.01)
        quiet = [asyncio.create_task(ask("quiet", QUIET)) for _ in range(2)]
        await asyncio.gather(*flood, *quiet)
        return ended

    ended = server.run(main())
    assert len(ended) == 10 and max(i for i, name in enumerate(ended) if name == "quiet") <= 4
