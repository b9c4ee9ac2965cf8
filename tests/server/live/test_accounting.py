"""What the server says that it did is what its clients saw."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections import Counter
from typing import Any

import pytest

RAISE, SLOW = 199, 200  # a step with a prompt that holds one of these raises, or takes 0.2 s longer
A = 64  # the token of "a"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = ("--log-format", "json", "--max-num-seqs", "4", "--max-queued-requests", "4")
    with live_server(tiny_model, *flags, faults={"raise": RAISE, "slow": SLOW}) as server:
        yield server


class History:
    """What clients sent and got, in the words of the metrics."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.request_ids: list[str] = []  # of each generation

    def add_answer(self, path: str, answer: Any, reasons: list[str]) -> None:
        """``reasons``: how its generations ended."""
        self.http[path, "POST", answer.status] += 1
        self.reasons.update(reasons)
        self.request_ids += [answer.headers["x-request-id"]] * len(reasons)

    def add_usage(self, usage: dict[str, Any]) -> None:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.output_tokens += usage["completion_tokens"]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "ignore_eos": True, "return_token_ids": True, **fields}


# Bodies, and how their generations end.
GOOD: list[tuple[str, dict[str, Any], list[str]]] = [
    (COMPLETIONS, completion(max_tokens=1), ["length"]),
    (COMPLETIONS, completion(max_tokens=33), ["length"]),
    (COMPLETIONS, completion(max_tokens=9, n=3), ["length"]),
    (COMPLETIONS, completion(max_tokens=5, prompt=["a", "bc", "def"]), ["length"] * 3),
    (COMPLETIONS, completion(max_tokens=5, prompt=["a", "bc"], n=2), ["length"] * 2),
    (COMPLETIONS, completion(allowed_token_ids=[A], stop=["aaa"]), ["stop"]),
    (COMPLETIONS, completion(allowed_token_ids=[A], stop_token_ids=[A]), ["stop"]),
    (COMPLETIONS, completion(max_tokens=20, prompt="long " * 30), ["length"]),
    (COMPLETIONS, completion(max_tokens=20, prompt="long " * 30), ["length"]),
    (COMPLETIONS, completion(max_tokens=0, echo=True, logprobs=1), ["length"]),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True}, ["length"]),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "n": 2, "ignore_eos": True}, ["length"]),
]
BAD: list[tuple[str, Any, int, list[str]]] = [
    (COMPLETIONS, completion(n=0), 400, []),
    (COMPLETIONS, completion(max_tokens=10_000), 400, []),
    (COMPLETIONS, completion(model="another"), 404, []),
    (COMPLETIONS, b"{", 400, []),
    (CHAT, {"messages": []}, 400, []),
    (COMPLETIONS, completion(prompt=[RAISE]), 500, ["error"]),
    (COMPLETIONS, completion(prompt=[RAISE], stream=True), 500, ["error"]),
    (COMPLETIONS, completion(timeout=1e-6), 504, ["timeout"]),
    (COMPLETIONS, completion(prompt=[SLOW], max_tokens=100, timeout=0.5), 504, ["timeout"]),
]


def test_counters_are_what_clients_saw(server):
    before, lines_before = server.counters(), len(finished_lines(server))
    history = History()

    async def main() -> None:
        await _ask_good_things(server, history)
        tokens = await _counters(server)
        for name, value in (
            ("prompt_tokens_total", history.prompt_tokens),
            ("prompt_tokens_cached_total", history.cached_tokens),
            # The prompt that was only scored brought a token, too, that no client was shown.
            ("generation_tokens_total", history.output_tokens + 1),
        ):
            assert tokens.sum(name) - before.sum(name) == value, name
        await _ask_bad_things(server, history)
        await _leave(server, history)
        await _ask_too_much(server, history)

    server.run(main())
    server.wait_until_idle()
    after = server.counters()

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    num_generations = sum(history.reasons.values())
    assert history.cached_tokens > 0 and history.reasons["abort"] == 3
    assert grown("requests_submitted_total") == num_generations
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert grown("request_success_total", finished_reason=reason) == history.reasons[reason]
    assert grown("request_success_total") == num_generations
    for (route, method, status), count in history.http.items():
        labels = {"route": route, "method": method, "status": str(status)}
        assert grown("http_requests_total", **labels) == count, labels
    for route in (COMPLETIONS, CHAT):
        count = sum(n for (path, *_), n in history.http.items() if path == route)
        assert grown("http_requests_total", route=route) == count
        assert grown("http_request_duration_seconds_count", route=route) == count
    num_rejected = history.http[COMPLETIONS, "POST", 503]
    assert num_rejected and grown("admission_rejections_total") == num_rejected
    assert grown("admission_rejections_total", reason="queue_requests") == num_rejected
    assert grown("client_disconnects_total") == history.reasons["abort"]
    # The histograms have each request once.
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_n"):
        assert grown(f"{name}_count") == num_generations
    assert grown("request_generation_tokens_sum") == grown("generation_tokens_total")
    assert grown("e2e_request_latency_seconds_count") == num_generations
    # Errors have no token; nor have timeouts in the queue.
    assert num_generations - 3 - grown("time_to_first_token_seconds_count") in (0, 1)
    for name in ("engine_restarts_total", "corrupted_requests_total", "slow_readers_cut_total"):
        assert grown(name) == 0
    _check_log(server, history, lines_before, grown)


async def _counters(server) -> Any:
    return await asyncio.to_thread(server.counters)


async def _ask_good_things(server, history: History) -> None:
    for path, body, reasons in GOOD:
        answer = await server.ask(path, body)
        assert answer.status == 200, answer.body
        history.add_answer(path, answer, reasons)
        history.add_usage(answer.json()["usage"])
        _check_tokens(answer.json())
        if body.get("max_tokens") == 0:
            continue
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        stream = await server.complete(body, path=path)
        history.add_answer(path, stream, reasons)
        history.add_usage(stream.usage)
        assert stream.finish_reasons == [reasons[0]] * (len(reasons) * body.get("n", 1))


def _check_tokens(answer: dict[str, Any]) -> None:
    """The usage counts the tokens that are there."""
    choices = answer["choices"]
    if "token_ids" in choices[0]:
        num_tokens = sum(len(choice["token_ids"]) for choice in choices)
        assert answer["usage"]["completion_tokens"] == num_tokens


async def _ask_bad_things(server, history: History) -> None:
    for path, body, status, reasons in BAD:
        answer = await server.ask(path, body)
        assert answer.status == status, answer.body
        history.add_answer(path, answer, reasons)


async def _leave(server, history: History) -> None:
    """Clients that have seen a token, and want no more."""
    for _ in range(3):
        stream = await server.stream(completion(prompt=[SLOW], max_tokens=100, stream=True))
        await stream.next()
        await stream.close()
        history.add_answer(COMPLETIONS, stream, ["abort"])


async def _ask_too_much(server, history: History) -> None:
    body = completion(prompt=[SLOW], max_tokens=4)
    answers = await asyncio.gather(*(server.ask(COMPLETIONS, body) for _ in range(30)))
    for answer in answers:
        history.add_answer(COMPLETIONS, answer, ["length"] if answer.status == 200 else [])


# -- the log -----------------------------------------------------------------------------------


def finished_lines(server) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log]
    return [line for line in lines if line["message"] == "request finished"]


def _check_log(server, history: History, num_before: int, grown: Any) -> None:
    """One line for each generation, with the same figures."""
    deadline = time.monotonic() + 10
    while len(finished_lines(server)) - num_before < len(history.request_ids):
        assert time.monotonic() < deadline, "there are lines missing"
        time.sleep(0.05)
    lines = finished_lines(server)[num_before:]
    assert Counter(line["external_id"] for line in lines) == Counter(history.request_ids)
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert Counter(line["reason"] for line in lines) == +history.reasons
    assert sum(line["output_tokens"] for line in lines) == grown("generation_tokens_total")
    with_tokens = [line for line in lines if line["output_tokens"]]
    assert sum(line["prompt_tokens"] for line in with_tokens) == grown("prompt_tokens_total")
    for line in with_tokens:
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]


def test_every_line_of_the_log_is_json(server):
    server.fetch("/nowhere\\")
    for line in server.log:
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()
    assert "exception" in "".join(server.log)  # the engine's lines are there, too


# -- request ids -------------------------------------------------------------------------------


def test_a_request_id_comes_back(server):
    given = "id-of-mine/42"
    paths = [COMPLETIONS, "/nowhere", "/health", "/metrics"]
    for path in paths:
        body = completion(max_tokens=1) if path == COMPLETIONS else None
        answer = server.fetch(path, body, headers={"X-Request-Id": given})
        assert answer.headers["x-request-id"] == given
    stream = server.run(
        server.complete(completion(max_tokens=1, stream=True), headers={"X-Request-Id": given})
    )
    assert stream.headers["x-request-id"] == given
    made = [server.fetch("/health").headers["x-request-id"] for _ in range(5)]
    assert len(set(made)) == 5
    for bad in ("x" * 129, "with space", "ä", ""):
        answer = server.fetch("/health", headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"] not in (bad, given)


# -- the form ----------------------------------------------------------------------------------


def test_vllms_names_have_the_same_values(server):
    server.fetch(COMPLETIONS, completion(max_tokens=2))
    lines = server.fetch("/metrics?names=all").body.decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_running"):
        (ours,) = [v for key, v in samples.items() if key.startswith(f"octavo:{name}{{")]
        (theirs,) = [v for key, v in samples.items() if key.startswith(f"vllm:{name}{{")]
        assert ours == theirs


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_finds_no_fault(server):
    text = server.fetch("/metrics?names=plain").body
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")
