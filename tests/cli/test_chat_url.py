"""A conversation with the model of a running server."""

from __future__ import annotations

import io
import sys

import pytest
from small_server import small_server

from octavo import cli

CHATS, MODELS = "/v1/chat/completions", "/v1/models"
LISTED = {"data": [{"id": "one", "sampling_defaults": {"temperature": 0.3}}, {"id": "two"}]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def said(*deltas, end="stop", done=True):
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    events.append({"choices": [], "usage": USAGE, "timings": {"predicted_per_second": 12.5}})
    return [*events, b"[DONE]"] if done else events


@pytest.fixture
def talk(monkeypatch, capsys):
    """``talk(answers, lines, *flags)``: status, stdout, stderr, and what the server was asked."""

    def run(answers, lines, *flags):
        with small_server({MODELS: LISTED, **answers}) as server:
            monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
            status = cli.main(["chat", "--url", f"{server.url}/v1", *flags])
            captured = capsys.readouterr()
            return status, captured.out, captured.err, server.requests

    return run


def test_an_answer_is_streamed_with_the_models_own_sampling(talk):
    answer = said({"reasoning_content": "Hm."}, {"content": "Bl"}, {"content": "ue."})
    status, out, err, requests = talk({CHATS: answer}, "Which?\n/stats\nAgain\n")
    assert (status, out.splitlines()[0]) == (0, "Blue.")
    assert "thinking: Hm." in err
    assert "9 prompt tokens (4 cached), 2 output tokens (stop)" in out and "12.5 tokens/s" in out
    (_, first), (_, second) = [(path, body) for path, _, body in requests if path == CHATS]
    assert (first["model"], first["temperature"], first["stream"]) == ("one", 0.3, True)
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]


def test_flags_and_names_go_to_the_server(talk, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "k")
    flags = ("two", "--top-k", "3", "--choice", "a,b", "--system", "Be brief.")
    _, _, _, requests = talk({CHATS: said({"content": "a"})}, "Hi\n", *flags)
    path, headers, body = requests[-1]
    assert (path, headers["Authorization"]) == (CHATS, "Bearer k")
    assert (body["model"], body["top_k"], body["temperature"]) == ("two", 3, 0.7)
    assert body["structured_outputs"] == {"choice": ["a", "b"]}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "max_tokens" not in body


def test_tools_are_called_here(talk, tmp_path):
    file = tmp_path / "tools.py"
    file.write_text('def double(x: int) -> int:\n    """Double a number."""\n    return 2 * x\n')
    function = {"name": "double", "arguments": '{"x": 4}'}
    call = {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}
    answers = {CHATS: said(call, end="tool_calls")}
    flags = ("--tools", str(file), "--yes", "--max-tool-turns", "1")
    _, _, err, requests = talk(answers, "Double 4\n", *flags)
    assert "-> double" in err and "<- 8" in err
    assert requests[-1][2]["tools"][0]["function"]["name"] == "double"


@pytest.mark.parametrize(
    ("answers", "flags", "status", "words"),
    [
        ({}, ("tow",), 2, "has no model tow; did you mean two?"),
        ({}, ("--threads", "2"), 2, "--threads: with --url the server has an engine already"),
        ({MODELS: ({"error": {"message": "no key"}}, 401)}, (), 1, "401: no key: set OCTAVO_API"),
        (
            {CHATS: ({"error": {"message": "too long"}}, 400)},
            (),
            0,
            "error: the server answers 400",
        ),
        ({CHATS: said({"content": "x"}, done=False)}, (), 0, "ended the answer before its end"),
        ({CHATS: [{"error": {"message": "it died"}}]}, (), 0, "it died"),
    ],
)
def test_what_goes_wrong_is_said(talk, answers, flags, status, words):
    got, _, err, _ = talk(answers, "Hi\n", *flags)
    assert (got, words in err) == (status, True), err


def test_a_server_that_is_not_there_is_said_in_one_line(capsys):
    assert cli.main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert cli.main(["chat", "--url", "ftp://x"]) == 2
