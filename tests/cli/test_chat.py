from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.base.errors import PromptTooLongError
from octavo.core.structured_outputs import StructuredOutputs

ANSWER = "The sky is blue.\n"


@pytest.fixture
def talk(fake_llm, monkeypatch, capsys):
    """``talk(lines, *flags)`` types the lines; returns the exit status, stdout and stderr."""

    def run(lines: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = cli.main(["chat", *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def contents(messages: list[dict]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in messages]


def test_conversation_keeps_its_history(fake_llm, talk) -> None:
    assert talk("Hello\n\nAgain\n") == (0, ANSWER + ANSWER, "")
    calls = fake_llm.made[0].calls
    assert contents(calls[0][1]) == [("user", "Hello")]
    assert contents(calls[1][1]) == [
        ("user", "Hello"),
        ("assistant", "The sky is blue."),
        ("user", "Again"),
    ]
    assert fake_llm.made[0].closed


def test_flags(fake_llm, talk) -> None:
    talk("Hi\n", "tiny", "--system", "Be brief.", "--top-k", "3", "--threads", "1")
    llm = fake_llm.made[0]
    assert (llm.model, llm.kwargs) == ("tiny", {"threads": 1})
    assert contents(llm.calls[0][1]) == [("system", "Be brief."), ("user", "Hi")]
    assert (llm.calls[0][2].top_k, llm.calls[0][2].temperature) == (3, 0.7)


def test_answers_are_constrained_until_they_are_set_free(fake_llm, talk) -> None:
    free = "/set structured_outputs null"
    status, _, _ = talk(f"Hi\n{free}\nHi\n", "--choice", "yes,no")
    constrained, after = (call[2].structured_outputs for call in fake_llm.made[0].calls)
    assert status == 0 and after is None
    assert constrained == StructuredOutputs(choice=("yes", "no"))


def test_what_the_models_authors_recommend_goes_before_our_default(fake_llm, talk) -> None:
    fake_llm.recommended = {"top_p": 0.9}
    talk("Hi\n")
    params = fake_llm.made[0].calls[0][2]
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.9, None)


def test_exit_ends_before_the_next_line(fake_llm, talk) -> None:
    assert talk("/exit\nHello\n") == (0, "", "")
    assert fake_llm.made[0].calls == []


def test_clear_keeps_the_system_message(fake_llm, talk) -> None:
    talk("One\n/clear\nTwo\n", "--system", "S")
    assert contents(fake_llm.made[0].calls[1][1]) == [("system", "S"), ("user", "Two")]


def test_system_begins_anew(fake_llm, talk) -> None:
    _, out, _ = talk("/system\nOne\n/system You are a pirate.\n/system\nTwo\n")
    assert out == f"no system message\n{ANSWER}You are a pirate.\n{ANSWER}"
    assert contents(fake_llm.made[0].calls[1][1]) == [
        ("system", "You are a pirate."),
        ("user", "Two"),
    ]


def test_set_changes_sampling(fake_llm, talk) -> None:
    _, out, err = talk('/set temperature 0.2\n/set stop ["x"]\n/set max_tokens 7\nHi\n')
    params = fake_llm.made[0].calls[0][2]
    assert (params.temperature, params.stop, params.max_tokens) == (0.2, ("x",), 7)
    assert "temperature = 0.2\nstop = ('x',)\nmax_tokens = 7\n" in out and err == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "temperature: must be a number"),
        ("/set top_p 2", "top_p"),
        ("/set n 2", "no setting 'n'"),
        ("/set nothing 1", "no setting 'nothing'"),
        ("/what", "no command /what"),
        ("/save", "/save needs a file name"),
        ("/save /no/such/folder/x", "cannot write"),
    ],
)
def test_mistakes_are_told_and_survived(fake_llm, talk, line: str, words: str) -> None:
    status, out, err = talk(f"{line}\nHi\n")
    assert status == 0 and words in err
    assert out == ANSWER
    assert fake_llm.made[0].calls[0][2].temperature == 0.7


def test_set_lists_the_settings(talk) -> None:
    _, out, _ = talk("/set\n")
    assert "temperature = 0.7\n" in out and "best_of" not in out


def test_help_lists_every_command(talk) -> None:
    _, out, _ = talk("/help\n")
    for name in ("clear", "system", "set", "save", "stats", "exit"):
        assert f"/{name}" in out


def test_save_writes_messages(talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    _, out, _ = talk(f"Grüße\n/save {path}\n")
    assert contents(json.loads(path.read_text("utf-8"))) == [
        ("user", "Grüße"),
        ("assistant", "The sky is blue."),
    ]
    assert f"saved 2 messages to {path}" in out


def test_stats(talk) -> None:
    _, out, _ = talk("/stats\nHi\n/stats\n")
    assert out.startswith("no answer yet\n") and out.endswith("20.0 tokens/s\n")


def test_ctrl_c_stops_the_answer_not_the_program(fake_llm, talk, ctrl_c) -> None:
    def press(self: object, i: int) -> None:
        if i == 1 and len(fake_llm.made[0].calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fake_llm.on_chunk = press
    before = signal.getsignal(signal.SIGINT)
    assert talk("One\nTwo\n") == (0, "The sky \n" + ANSWER, "")
    calls = fake_llm.made[0].calls
    assert contents(calls[1][1])[1] == ("assistant", "The sky ")
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_ends_the_program(fake_llm, talk, ctrl_c) -> None:
    def press_twice(self: object, i: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    fake_llm.on_chunk = press_twice
    assert talk("One\nTwo\n")[0] == 130
    assert fake_llm.made[0].closed


def test_failed_turn_is_forgotten(fake_llm, talk) -> None:
    fake_llm.error = PromptTooLongError("the conversation is too long: /clear", 10, 5)
    status, out, err = talk("One\n/save /dev/null\n")
    assert status == 0 and err.count("too long") == 1
    assert "saved 0 messages" in out


def test_model_without_template_exits_1(fake_llm, talk) -> None:
    fake_llm.has_chat_template = False
    status, _, err = talk("One\n")
    assert status == 1 and "has no chat template" in err and "generate --raw" in err
