"""Requests that each key allows, and what stays secret."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

OPERATORS = (
    *("/steps", "/metrics", "/load", "/slots", "/octavo/tensors", "/octavo/tensors/{name}"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
KEY, OTHER_KEY, WRONG_KEY = "sk-canary-ann-7d1f", "sk-canary-bob-93ac", "sk-canary-eve-0000"
VARIABLE_KEY = "sk-canary-variable-55aa"
PROMPT = "canary prompt: the treasure is under the oak"
RAISE = 199  # a step with a prompt that holds this token raises

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
HIDDEN_PATHS = ("/openapi.json", "/docs", "/redoc", "/", "/nowhere", "/v1", "/static", "/health/x")

# Spellings by which a guard and a router could mean different paths.
TRICKS = (
    "//health",
    "/health/",
    "/health//",
    "/./health",
    "/health/.",
    "/health/../metrics",
    "/health/..%2fmetrics",
    "/health%2f..%2fmetrics",
    "/%68ealth",
    "/health%00",
    "/health%20",
    "/health;/metrics",
    "/health;x=1",
    "/health/metrics",
    "/HEALTH",
    "/Health",
    "/x/../health",
    "/metrics/../health",
    "/metrics#/health",
    "/metrics?/health",
    "/metrics%3f/health",
    "/v1/models?path=/health",
    "/\\health",
    "/health\\..\\metrics",
    "http://127.0.0.1/health",
    "*",
)

# What no answer and no log may show.
_INSIDES = re.compile(r"Traceback|File \"|\.py\b|0x[0-9a-f]{6,}|site-packages|/home/|/tmp/|/root")


@pytest.fixture(scope="module")
def server(live_server, tiny_model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# of the test\n{KEY}\n{OTHER_KEY}\n")
    flags = ("--api-key-file", str(keys), "--log-level", "debug")
    env = {"OCTAVO_API_KEY": VARIABLE_KEY}
    with live_server(tiny_model, *flags, env=env, faults={"raise": RAISE}, key=KEY) as server:
        yield server


def bearing(key: str | None) -> dict[str, str]:
    # An empty value replaces what the server's own clients send.
    return {"Authorization": f"Bearer {key}" if key else ""}


def check_clean(answer: Any) -> None:
    """An error shows nothing of our insides."""
    if answer.status >= 400:
        assert not _INSIDES.search(answer.body.decode()), answer.body


# -- deny by default ---------------------------------------------------------------------------


def test_every_route_and_method_wants_the_right_key(server):
    paths = [*server.fetch("/openapi.json").json()["paths"], *HIDDEN_PATHS]
    cases = [(path, method) for path in paths for method in METHODS]

    def ask(key: str | None) -> list[Any]:
        return server.run(_ask_all(server, cases, bearing(key)))

    for key in (None, WRONG_KEY, KEY + "x", KEY[:-1], KEY.upper()):
        for (path, method), answer in zip(cases, ask(key), strict=True):
            is_open = path == "/health" and method in ("GET", "HEAD")
            assert answer.status == (200 if is_open else 401), (path, method, answer)
            check_clean(answer)
            if not is_open:
                assert answer.headers["www-authenticate"]
    for right in (KEY, OTHER_KEY, VARIABLE_KEY):
        answers = ask(right)
        for (path, method), answer in zip(cases, answers, strict=True):
            statuses = (403,) if path.partition("?")[0] in OPERATORS else (200, 307, 400, 404, 405)
            assert answer.status in statuses, (path, method, answer)
            check_clean(answer)
        assert sum(answer.status == 200 for answer in answers) >= 12


async def _ask_all(server, cases: list[tuple[str, str]], headers: dict[str, str]) -> list[Any]:
    """The answers to all, some at a time."""
    answers: list[Any] = []
    for at in range(0, len(cases), 16):
        some = cases[at : at + 16]
        answers += await asyncio.gather(
            *(server.ask(path, method=method, headers=headers) for path, method in some)
        )
    return answers


@pytest.mark.parametrize("key", [None, WRONG_KEY])
def test_no_spelling_of_a_path_goes_around_the_key(server, key):
    cases = [(path, method) for path in TRICKS for method in ("GET", "HEAD", "POST", "OPTIONS")]
    answers = server.run(_ask_all(server, cases, bearing(key)))
    for (path, method), answer in zip(cases, answers, strict=True):
        assert answer.status in (400, 401), (path, method, answer)
        check_clean(answer)
    assert server.fetch("/health?metrics", headers=bearing(key)).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "authorization",
    [
        KEY,
        f"Basic {KEY}",
        f"Token {KEY}",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY} {KEY}",
        "Bearer None",
    ],
)
def test_a_key_comes_as_a_bearer_token(server, authorization):
    answer = server.fetch("/v1/models", headers={"Authorization": authorization})
    assert answer.status == 401


def test_a_key_elsewhere_is_none(server):
    for path in (f"/v1/models?api_key={KEY}", f"/v1/models?key={KEY}"):
        assert server.fetch(path, headers=bearing(None)).status == 401
    for name in ("X-Api-Key", "Api-Key", "Cookie", "X-Forwarded-Authorization"):
        assert server.fetch("/v1/models", headers={**bearing(None), name: KEY}).status == 401


def test_a_websocket_is_refused(server):
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with server.connect() as connection:
        connection.sendall(server.request("/v1/models", headers={**upgrade, **bearing(None)}))
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


# -- browsers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_refused(server, host):
    for path in ("/health", "/v1/models", "/"):
        answer = server.fetch(path, headers={"Host": host})
        assert answer.status in (400, 403), answer
        check_clean(answer)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost", "null"])
def test_a_foreign_page_is_refused(server, origin):
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = server.fetch("/v1/completions", method=method, headers=headers)
        assert answer.status == 403, answer
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_form_cannot_ask(server):
    """What a browser sends to other sites without asking them has none of JSON's types."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        for status, headers in (
            (403, {"Origin": "https://elsewhere.example"}),
            (403, {"Origin": "null"}),
            (403, {"Sec-Fetch-Site": "cross-site"}),
            (400, {"User-Agent": "Mozilla/5.0"}),
        ):
            answer = server.fetch(
                "/v1/completions", body, headers={"Content-Type": kind, **headers}
            )
            assert answer.status == status, (kind, headers, answer)


def test_what_curl_calls_a_form_is_read(server):
    """``curl -d '{…}'``, without a header."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "curl/8.5.0"}
    assert server.fetch("/v1/completions", body, headers=headers).status == 200


# -- secrets -----------------------------------------------------------------------------------


def use_everything(server) -> list[Any]:
    """Answers to requests of all kinds, good and bad, with secrets in them."""
    message = {"role": "user", "content": PROMPT}
    raising = {"prompt": [*PROMPT.encode(), RAISE], "max_tokens": 2}
    requests: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "echo": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6}),
        ("/v1/completions", {"prompt": PROMPT, "stop": PROMPT, "bad_words": [PROMPT]}),
        ("/v1/completions", {"prompt": PROMPT, "no_such_field": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT, "timeout": 1e-6}),
        ("/v1/completions", raising),
        ("/v1/completions", {**raising, "stream": True}),
        ("/v1/completions", json.dumps({"prompt": PROMPT}).encode()[:-1]),
        ("/v1/chat/completions", {"messages": [message], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [message], "user": PROMPT, "tools": PROMPT}),
        ("/v1/chat/completions", {"messages": [{**message, "role": PROMPT}]}),
        ("/generate", {"prompt": PROMPT, "max_tokens": 4}),
        ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [*PROMPT.encode()]}),
        ("/v1/completions?secret=" + KEY, {"prompt": PROMPT, "model": PROMPT}),
    ]
    answers = [server.fetch(path, body) for path, body in requests]
    for key in (WRONG_KEY, None):
        answers.append(server.fetch("/v1/models", headers=bearing(key)))
    return answers


def test_keys_and_prompts_are_told_to_nobody(server):
    answers = use_everything(server)
    assert {answer.status for answer in answers} == {200, 400, 401, 404, 500, 504}
    for answer in answers:
        check_clean(answer)
        assert b"sk-canary" not in answer.body
    server.wait_until_idle()
    metrics = server.fetch("/metrics").body.decode()
    log = "\n".join(server.log)
    for text in (metrics, log):
        assert "sk-canary" not in text
        assert "treasure" not in text and "canary prompt" not in text
        assert ", ".join(map(str, PROMPT.encode()[:8])) not in text  # as token ids
    assert "a poisoned prompt" in log  # so what went wrong is there
    for pid in (server.pid, *server.descendants()):
        assert b"sk-canary" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in server.descendants():
        assert b"sk-canary" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_prompts_are_logged_if_asked_for(live_server, tiny_model):
    flags = ("--log-prompts", "--api-key", KEY)
    with live_server(tiny_model, *flags, key=KEY) as server:
        body = {"prompt": PROMPT + "\n2026 ERROR forged\x1b[2J", "max_tokens": 4}
        assert server.fetch("/v1/completions", body).status == 200
        assert b"sk-canary" not in Path(f"/proc/{server.engine_pid}/cmdline").read_bytes()
        assert b"sk-canary" not in Path(f"/proc/{server.engine_pid}/environ").read_bytes()
        server.signal(signal.SIGTERM)
        server.wait(10)
    assert any("treasure" in line for line in server.log)
    assert not any("\x1b" in line or line.startswith("2026 ERROR forged") for line in server.log)
    assert "sk-canary" not in "\n".join(server.log)


def test_nothing_that_is_sent_forges_a_log_line(server):
    begin = len(server.log)
    forged = "x%0d%0aforged%0a"
    for path in (f"/{forged}", f"/v1/models/{forged}", f"/health?{forged}"):
        server.fetch(path)
    for name in ("User-Agent", "X-Request-Id", "X-Forwarded-For", "Referer"):
        server.fetch("/v1/models", headers={name: "x\tforged \x85forged"})
    server.fetch("/v1/completions", {"prompt": "a", "model": "\n\rforged", "user": "\nforged"})
    server.fetch("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "forged"})
    server.fetch("/v1/completions", {"prompt": [RAISE], "max_tokens": 1})  # with a traceback
    time.sleep(0.1)
    assert len(server.log) > begin
    assert not [line for line in server.log[begin:] if not re.match(r"20\d\d-|    \|", line)]


# -- prefixes ----------------------------------------------------------------------------------


def test_prefixes_are_shared_within_a_key_only(server):
    body = {"prompt": "a prefix that costs some blocks " * 4, "max_tokens": 2, "temperature": 0}

    def ask(key: str, **fields: Any) -> tuple[int, str]:
        answer = server.fetch("/v1/completions", {**body, **fields}, headers=bearing(key)).json()
        details = answer["usage"]["prompt_tokens_details"]
        return details["cached_tokens"], answer["choices"][0]["text"]

    (cold, text), (warm, same_text) = ask(KEY), ask(KEY)
    assert (cold, warm) == (0, 112) and same_text == text
    assert ask(OTHER_KEY) == (0, text)
    assert ask(OTHER_KEY) == (112, text)
    assert ask(KEY, cache_salt="mine") == (0, text)
    assert ask(KEY, cache_salt="mine") == (112, text)
    assert ask(OTHER_KEY, cache_salt="mine") == (0, text)


# -- sockets -----------------------------------------------------------------------------------


def test_there_is_one_listening_socket(server):
    server.fetch("/v1/completions", {"prompt": "a", "max_tokens": 1})
    pids = (server.pid, *server.descendants())
    sockets = [(pid, *each) for pid in pids for each in _sockets(pid)]
    listening = [each for each in sockets if each[1].startswith("tcp") and each[4] == "0A"]
    assert [(pid, address) for pid, _, address, *_ in listening] == [
        (server.pid, f"0100007F:{server.port:04X}")
    ]
    for _, kind, local, *_ in sockets:
        assert not kind.startswith(("udp", "raw"))
        # Connections of clients, and nothing that leads elsewhere.
        assert not kind.startswith("tcp") or local == f"0100007F:{server.port:04X}"
    named = [line for pid in pids for line in _named_unix_sockets(pid)]
    assert named == []


def _inodes(pid: int) -> set[str]:
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:")}


def _sockets(pid: int) -> list[tuple[str, str, str, str]]:
    """Kind, local and remote address, and state, of a process's network sockets."""
    inodes, found = _inodes(pid), []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        table = Path(f"/proc/{pid}/net/{kind}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[9] in inodes:
                found.append((kind, fields[1], fields[2], fields[3]))
    return found


def _named_unix_sockets(pid: int) -> list[str]:
    inodes = _inodes(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in inodes and len(row) > 7]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_it_connects_to_nobody(live_server, tiny_model, tmp_path):
    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-qq", "-e", "trace=connect,bind,listen,sendto,sendmsg")
    try:
        server = live_server(tiny_model, prefix=(*prefix, "-o", str(trace)), waits=False)
        with server:
            server.wait_until_ready()
            for path, body in (
                ("/v1/completions", {"prompt": "http://example.org/", "max_tokens": 2}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                ("/", None),
            ):
                assert server.fetch(path, body).status == 200
            server.signal(signal.SIGTERM)
            assert server.wait(20) == 0
    except AssertionError:
        if "ptrace" in "\n".join(server.log):
            pytest.skip("strace may not trace here")
        raise
    calls = trace.read_text()
    (bound,) = re.findall(r"^(\d+ +)bind\((\d+), {sa_family=AF_INET.*\"127.0.0.1\"", calls, re.M)
    assert set(re.findall(r"^(\d+ +)listen\((\d+),", calls, re.M)) == {bound}
    assert calls.count("bind(") == 1
    network = [line for line in calls.splitlines() if re.search(r"AF_INET|AF_NETLINK", line)]
    assert not [line for line in network if "connect(" in line or "sendto(" in line], network
