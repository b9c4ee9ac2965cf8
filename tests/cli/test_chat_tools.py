from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import cli
from octavo.chat_formats.messages import ToolCall, ToolCallDelta
from octavo.cli import chat_input, chat_tools
from octavo.cli.chat_tools import visible

CALL = ToolCallDelta(0, "1", "double", '{"n": 4}')
SOURCE = '''
def double(n: int) -> int:
    """Double a number."""
    if n < 0:
        raise ValueError("too small")
    return 2 * n
'''


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def talk(fake_llm, monkeypatch, capsys):
    """``talk(said, *flags, asks=[…])`` says things and answers questions about calls, as on a
    terminal if there are answers; returns the exit status, stdout, stderr and the messages."""
    fake_llm.tool_calls = [CALL]

    def run(said: str, *flags: str, asks: list | None = None) -> tuple[int, str, str, list]:
        stdin = io.StringIO(said)
        monkeypatch.setattr(stdin, "isatty", lambda: asks is not None, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(chat_input, "messages", lambda complete: iter(said.splitlines()))
        answers: Iterator = iter(asks or ())

        def say_next(question: str) -> str:
            answer = next(answers)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr("builtins.input", say_next)
        status = cli.main(["chat", *flags])
        assert next(answers, None) is None
        captured = capsys.readouterr()
        made = fake_llm.made
        return status, captured.out, captured.err, made[0].calls[-1][1] if made else []

    return run


def test_a_call_is_made_and_its_result_given_to_the_model(fake_llm, talk, tools: str) -> None:
    status, out, err, messages = talk("Hi", "--tools", tools, "--yes")
    assert (status, out) == (0, "The sky is blue.\n")
    assert err == 'thinking: I call.\n-> double({"n": 4})\n<- 8\n'
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "double", "arguments": '{"n": 4}'}
    assert messages[2]["content"] == "8"
    (declared,) = fake_llm.made[0].tools
    assert declared["function"]["name"] == "double"
    assert declared["function"]["description"] == "Double a number."


def test_each_call_is_confirmed(talk, tools: str) -> None:
    _, _, _, messages = talk("Hi\nHo\n", "--tools", tools, asks=["", "what", "y", "n"])
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results == ["8", "error: the user refused this call"]


def test_always_is_for_one_tool(fake_llm, talk, tools: str) -> None:
    other = ToolCallDelta(1, "2", "other", "{}")
    fake_llm.tool_calls = [CALL, other]
    _, _, _, messages = talk("Hi\nHo\n", "--tools", tools, asks=["a", "n", "n"])
    results = [message["content"] for message in messages if message["role"] == "tool"]
    refused = "error: the user refused this call"
    assert results == ["8", refused, "8", refused]


def test_an_interrupt_at_the_question_ends_the_turn_alone(talk, tools: str) -> None:
    _, out, _, messages = talk("Hi\nHo\n", "--tools", tools, asks=[KeyboardInterrupt(), "y"])
    assert out == "The sky is blue.\n"
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results == ["error: the user interrupted this call", "8"]


def test_nobody_to_ask_is_said_before_anything_is_run(fake_llm, talk, tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("1 / 0")
    status, _, err, _ = talk("Hi", "--tools", str(path))
    assert status == 2 and "--yes" in err and fake_llm.made == []


def test_errors_of_tools_are_told_to_the_model(fake_llm, talk, tools: str) -> None:
    fake_llm.tool_calls = [ToolCallDelta(0, "1", "double", '{"n": -1}')]
    _, _, err, messages = talk("Hi", "--tools", tools, "--yes")
    assert messages[2]["content"] == "error: ValueError: too small"
    assert "<- error: ValueError: too small" in err


def test_calls_of_an_answer_that_is_cut_off_are_not_made(fake_llm, talk, tools: str) -> None:
    fake_llm.call_end = "length"
    fake_llm.tool_calls = [ToolCallDelta(0, "1", "double", '{"n": ')]
    _, _, err, messages = talk("Hi\nHo", "--tools", tools, "--yes")
    assert "cut off in calls of tools, which are not made" in err
    assert messages == [{"role": "user", "content": "Ho"}]


def test_turns_are_bounded(talk, tools: str) -> None:
    _, out, err, messages = talk("Hi", "--tools", tools, "--yes", "--max-tool-turns", "1")
    assert out == "" and len(messages) == 1
    assert "called tools in every turn, 1 in all" in err


def test_tools_that_cannot_be_used_end_the_command(fake_llm, talk, tools: str) -> None:
    for flags, words in [
        (["--tools", tools, "--tools", tools], "two tools have the name 'double'"),
        (["--tools", "/no/such/file.py"], "there is no file"),
        (["--tools", "mcp:"], "mcp"),
    ]:
        status, _, err, _ = talk("Hi", *flags, "--yes")
        assert status == 1 and words in err and fake_llm.made == []


def test_what_is_confirmed_is_what_is_called(capsys) -> None:
    hidden = '{"path": "a", "note": "\\u001b[2K\\u202e", "path": "/etc"}'
    chat_tools.Calls(asks=False).allows(ToolCall("1", "read\x1b[2K", hidden))
    shown = capsys.readouterr().err
    assert shown == '-> read\\x1b[2K({"path": "/etc", "note": "\\u001b[2K\\u202e"})\n'
    assert visible("ä\n\u202e\x9b") == "ä\\n\\u202e\\x9b"
    assert json.loads(hidden)["path"] == "/etc"
