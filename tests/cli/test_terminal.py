from __future__ import annotations

import io
import sys

import pytest

from octavo.cli import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert terminal.format_bytes(count) == text


def test_escape_sequences_of_a_model_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a\x1b]0;owned\x07\x9b2J\r\tb\né"
    for stream, expected in (
        (Terminal(), "a\ufffd]0;owned\ufffd\ufffd2J\ufffd\tb\né"),
        (io.StringIO(), text),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        writer = terminal.AnswerWriter()
        for piece in (text[:3], text[3:]):
            writer.write(piece)
        writer.end()
        assert stream.getvalue() == expected + "\n"


def test_bar_appears_with_the_first_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.progress_bar("fetching", "tiny"):
        pass
    assert screen.getvalue() == ""
    with terminal.progress_bar("fetching", "tiny") as progress:
        progress(512, 1024)
    assert "fetching tiny" in screen.getvalue()


def test_json_is_one_line_of_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": "é\n"})
    assert capsys.readouterr().out == '{"a": "é\\n"}\n'
    with pytest.raises(ValueError):
        terminal.print_json(float("nan"))


def test_progress_as_lines_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 5.0, 15.0, 16.0, 40.0])
    lines = terminal.LineProgress(15.0, lambda: next(times))
    for done in (1, 2, 3, 4000):
        lines.update("quantizing", done, 5000)
    assert capsys.readouterr().err == "quantizing: 2 of 5,000\nquantizing: 4,000 of 5,000\n"
