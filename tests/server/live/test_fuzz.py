"""Random requests: whatever comes, the server answers, and goes on."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("a live server")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
)
# What a full queue, or a short timeout of the request's own, is answered with.
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]
"""

needs_schemathesis = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis"
)


@pytest.fixture(scope="module")
def server(shared_server, tiny_model):
    return shared_server(tiny_model)


@pytest.fixture(autouse=True)
def _the_server_goes_on(server):
    """Whatever a test does, nothing of it may stay."""
    engine = server.engine_pid
    yield
    load = server.wait_until_idle()
    assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)
    assert load["num_restarts"] == 0 and server.engine_pid == engine
    assert not [line for line in server.log if "Traceback" in line or "damaged" in line]


# -- from the OpenAPI document -----------------------------------------------------------------


@needs_schemathesis
def test_schemathesis_finds_nothing(server, tmp_path):
    """With what it makes up: a few requests for each operation."""
    flags = ("--phases", "fuzzing,stateful", "--max-examples", "3", "--generation-deterministic")
    run_schemathesis(server, tmp_path, *flags)


@needs_schemathesis
@pytest.mark.long
def test_schemathesis_finds_nothing_when_every_field_has_its_limits(server, tmp_path):
    """Some 5,000 requests, each with one field at or beyond what the document says of it."""
    flags = ("--phases", "examples,coverage", "--generation-deterministic")
    run_schemathesis(server, tmp_path, *flags)


@needs_schemathesis
@pytest.mark.long
def test_schemathesis_finds_nothing_in_five_minutes(server, tmp_path):
    run_schemathesis(server, tmp_path, "--max-time", "300", "--seed", "4")


def run_schemathesis(server, folder: Path, *flags: str) -> None:
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    url = f"http://{server.host}:{server.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", url]
    command += ["--checks", ",".join(CHECKS), "--max-response-time", "10", "--no-color", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# -- good fields in all combinations -----------------------------------------------------------

# Of each field, values that are good alone, and may not be together with others.
SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 30, 200],
    "min_tokens": [0, 1, 20],
    "temperature": [0, 1e-9, 0.7, 2],
    "top_p": [1e-6, 0.5, 1],
    "top_k": [-1, 0, 1, 2, 10**6],
    "min_p": [0, 0.5, 1],
    "typical_p": [0.01, 0.9],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 0.5],
    "repetition_penalty": [0.01, 1.3, 100],
    "n": [1, 2, 5],
    "seed": [-1, 0, 2**64 - 1],
    "stop": ["a", ["a", "b" * 50], "\u00e9", "\U0001f600", "\ufffd"],
    "stop_token_ids": [[], [1, 2, 3], [256]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "logit_bias": [{}, {"5": 100}, {"256": -100, "0": 50.5}],
    "bad_words": [["a"], ["\u00e9", " "]],
    "allowed_token_ids": [[], [7], [65, 66, 256], list(range(128, 256))],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "priority": [-5, 5],
    "cache_salt": ["salt"],
    "request_id": ["mine"],
    "timeout": [0.01, 60.0],
    "truncate_prompt_tokens": [-1, 1, 5],
    "truncation_side": ["left", "right"],
    "add_special_tokens": [False, True],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
}
COMPLETION = SAMPLING | {
    "prompt": ["a", "caf\u00e9 \U0001f600\u200d", [1, 2, 3], ["a", [4, 5]], "\x00", "x" * 240],
    "best_of": [1, 3, 6],
    "echo": [True],
    "logprobs": [0, 1, 20],
    "prompt_logprobs": [0, 3],
}
CHAT = SAMPLING | {
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "<eos>\u00e9"}],
        [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "The end is"}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}],
            }
        ],
    ],
    "logprobs": [True, False],
    "top_logprobs": [0, 20],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "max_completion_tokens": [3],
}
NEEDED = {"/v1/completions": ("prompt", COMPLETION), "/v1/chat/completions": ("messages", CHAT)}


@pytest.mark.parametrize("path", NEEDED)
def test_combinations_of_good_fields(server, path):
    rng = random.Random(path)
    bodies = [_random_body(rng, *NEEDED[path]) for _ in range(120)]

    async def ask_all() -> list[Any]:
        answers: list[Any] = []
        for at in range(0, len(bodies), 10):
            asking = (_ask_both_ways(server, path, body) for body in bodies[at : at + 10])
            answers += await asyncio.gather(*asking)
        return answers

    answers = server.run(ask_all())
    statuses = [answer.status for answer in answers]
    assert statuses.count(200) > 30
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status in (200, 400, 504), (body, answer)
        assert answer.is_whole
        if answer.status == 200:
            usage = answer.json()["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def _random_body(rng: random.Random, needed: str, fields: dict[str, list[Any]]) -> dict[str, Any]:
    names = [needed, *rng.sample(sorted(fields.keys() - {needed}), rng.randrange(8))]
    return {"max_tokens": 40} | {name: rng.choice(fields[name]) for name in names}


async def _ask_both_ways(server, path: str, body: dict[str, Any]) -> Any:
    """The answer, after a stream has been asked for the same: each is refused only for reasons that
    the other has, or that it alone can have."""
    stream = await server.complete({"seed": 1, **body, "stream": True}, path=path)
    answer = await server.ask(path, {"seed": 1, **body})
    if stream.status == 200 and answer.status == 200 and not stream.errors:
        assert stream.is_whole and stream.num_done == 1
        _check_same(body, stream, answer.json()["choices"])
    return answer


def _check_same(body: dict[str, Any], stream: Any, choices: list[dict[str, Any]]) -> None:
    """Seeded, a stream says the same, but where time decides, or where the best are chosen."""
    if body.get("seed") == -1 or "best_of" in body or "timeout" in body:
        return
    for choice in choices:
        mine = [each for each in stream.choices if each["index"] == choice["index"]]
        whole = choice["message"]["content"] if "message" in choice else choice["text"]
        pieces = [each.get("text") or each.get("delta", {}).get("content") or "" for each in mine]
        assert "".join(pieces) == whole, body
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
