"""While somebody sends a megabyte, everybody else is served: ``/health`` is asked all the time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from pace import python_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timing]

MEGABYTE = 1 << 20
PAUSE = 0.005  # seconds between two questions
# Rounds of Python that /health may take as long as, beside other work: 0.2 s, of which a quarter is
# usual.
MOST_ROUNDS = 4e6

# Renders as much as a request tells it to.
TEMPLATE = """
{%- for i in range(rows | default(1)) %}
{%- for j in range(columns | default(0)) %}{% endfor %}
{%- for message in messages %}{{ message.content }}{% endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def server(live_server, smollm2_gguf):
    with live_server("smollm2-135m", "--max-num-seqs", "4") as server:
        yield server


@pytest.fixture(scope="module")
def template_server(live_server, tiny_model, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with live_server(tiny_model, "--chat-template", str(template)) as server:
        yield server


class Poller(threading.Thread):
    """Asks for ``/health`` on one connection, until it is stopped. In seconds: ``latencies`` of the
    answers, and how late the machine woke the poller itself when it only waited: ``delays``."""

    def __init__(self, server: Any):
        super().__init__(daemon=True)
        self.latencies: list[float] = []
        self.delays: list[float] = []
        self._connection = server.connect()
        self._request = f"GET /health HTTP/1.1\r\nHost: {server.host}\r\n\r\n".encode()
        self._is_over = threading.Event()

    def run(self) -> None:
        with self._connection as connection:
            slept = time.perf_counter()
            while not self._is_over.wait(PAUSE):
                started = time.perf_counter()
                self.delays.append(started - slept - PAUSE)
                connection.sendall(self._request)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200")
                slept = time.perf_counter()
                self.latencies.append(slept - started)

    def __enter__(self) -> Poller:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self.join()


def words(size: int) -> str:
    """Text with enough variety that its tokens are not all the same."""
    count = size // 20 + 1  # of sentences, of which none is shorter than this
    text = " ".join(f"{number} bottles of {number * 7919 % 1000} beers" for number in range(count))
    return text[:size]


def messages(count: int, size: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": words(size // count)} for i in range(count)]


CASES = {
    "a text that cannot fit": (
        400,
        "/v1/completions",
        {"prompt": words(MEGABYTE), "max_tokens": 1},
    ),
    "a text to be cut": (
        200,
        "/v1/completions",
        {"prompt": words(MEGABYTE), "max_tokens": 1, "truncate_prompt_tokens": 16},
    ),
    "a text to be tokenized": (200, "/tokenize", {"prompt": words(MEGABYTE - 1)}),
    "one word": (400, "/v1/completions", {"prompt": "a" * MEGABYTE, "max_tokens": 1}),
    "a message that cannot fit": (
        400,
        "/v1/chat/completions",
        {"messages": messages(1, MEGABYTE), "max_tokens": 1},
    ),
    "many messages": (
        400,
        "/v1/chat/completions",
        {"messages": messages(2000, MEGABYTE), "max_tokens": 1},
    ),
    "a conversation to be cut": (
        200,
        "/v1/chat/completions",
        {"messages": messages(2000, MEGABYTE), "max_tokens": 1, "truncate_prompt_tokens": 16},
    ),
    "a list of token ids": (400, "/v1/completions", {"prompt": [1] * 400_000, "max_tokens": 1}),
    "many prompts": (200, "/v1/completions", {"prompt": [words(4000)[:400]] * 64, "max_tokens": 1}),
    "nested lists": (400, "/v1/completions", {"prompt": [[[1] * 60] * 100] * 60}),
    "too many keys": (400, "/v1/completions", {f"key {i}": "" for i in range(300_000)}),
    "many keys": (400, "/v1/completions", {f"key {i}": i for i in range(30_000)}),
    "a schema": (
        400,
        "/v1/chat/completions",
        {
            "messages": messages(1, 100),
            "max_tokens": 1,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "properties": {f"p{i}": {"type": "string"} for i in range(25_000)}
                        },
                    },
                }
            ],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_large_requests_stall_nobody(server, case):
    status, path, body = CASES[case]
    check(server, path, json.dumps(body).encode(), status, case)


def test_several_large_requests_at_once_stall_nobody(server):
    body = {"prompt": words(MEGABYTE), "truncate_prompt_tokens": 8, "max_tokens": 1}
    check(server, "/v1/completions", json.dumps(body).encode(), 200, "4 at once", count=4)


@pytest.mark.parametrize("work", [{"rows": 2_000}, {"rows": 1_000, "columns": 100_000}])
def test_heavy_templates_stall_nobody(template_server, work):
    """The request is small: what it has the template do is not."""
    body = {"messages": messages(2, 60), "max_tokens": 1, "chat_template_kwargs": work}
    content = json.dumps(body).encode()
    check(template_server, "/v1/chat/completions", content, 400, str(work))


def check(server, path: str, content: bytes, status: int, case: str, count: int = 1) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(server.ask(path, content) for _ in range(count)))

    most = python_seconds(MOST_ROUNDS, time.perf_counter)
    with Poller(server) as poller:
        time.sleep(0.05)
        answers = server.run(ask())
    for answer in answers:
        assert answer.status == status and answer.is_whole, answer.body[:500]
        if status == 400:
            assert answer.error["type"] == "invalid_request_error"
    worst, delay = max(poller.latencies), max(poller.delays)
    seconds = max(answer.seconds for answer in answers)
    print(
        f"/health: at most {worst * 1e3:.1f} ms (the poller was {delay * 1e3:.1f} ms late); "
        f"{case} ({len(content)} bytes) took {seconds * 1e3:.0f} ms"
    )
    assert worst < most + delay  # a machine that stalls delays the poller too
