from __future__ import annotations

import random

import pytest

from octavo.cli.wrapping import WordWrap


def wrapped(text: str, width: int = 10, pieces: int | None = None) -> str:
    wrap = WordWrap(lambda: width)
    if pieces is None:
        return wrap.feed(text) + wrap.end()
    written = "".join(wrap.feed(text[i : i + pieces]) for i in range(0, len(text), pieces))
    return written + wrap.end()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four", "one two\nthree four"),
        ("exactly te n", "exactly te\nn"),  # ten columns, and not one more
        ("short\nlines\n\nstay\n", "short\nlines\n\nstay\n"),
        ("averyverylongword here", "averyverylongword\nhere"),
        ("ab  cd   efghijk", "ab  cd\nefghijk"),
        ("- one two three", "- one two\nthree"),
        ("  indented one", "  indented\none"),
        ("你好你好你好", "你好你好你\n好"),
        ("你好你好你。好", "你好你好\n你。好"),  # a full stop begins no line
        ("a 你好你好 b", "a 你好你好\nb"),
        ("e\u0301e\u0301e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301e\u0301", None),  # ten columns
        (
            "```\nx = 1 + 2 + 3 + 4\n```\none two three",
            "```\nx = 1 + 2 + 3 + 4\n```\none two\nthree",
        ),
        ("~~~py\na b c d e f g\n~~~\n", "~~~py\na b c d e f g\n~~~\n"),
        ("a\n\n    x = 1 + 2 + 3\n", "a\n\n    x = 1 + 2 + 3\n"),
        ("| a | b | c | d |\n", "| a | b | c | d |\n"),
        ("a\tb cccc", "a\tb\ncccc"),
        ("", ""),
        ("   ", "   "),
    ],
)
def test_lines_end_between_words(text: str, expected: str | None) -> None:
    expected = text if expected is None else expected
    assert wrapped(text) == expected
    for pieces in (1, 2, 3, 7):
        assert wrapped(text, pieces=pieces) == expected


def test_no_line_is_too_long_and_no_word_is_lost() -> None:
    words = random.Random(1)
    text = " ".join("x" * words.randint(1, 12) for _ in range(500))
    for width in (12, 20, 79):
        lines = wrapped(text, width).split("\n")
        assert max(map(len, lines)) <= width
        assert " ".join(lines) == text


def test_a_word_is_written_as_soon_as_it_is_whole() -> None:
    wrap = WordWrap(lambda: 20)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " ", "wor", "ld.\n")] == [
        *("", "", "Hello", "", " world.\n"),
    ]


def test_the_width_is_asked_again_for_each_line() -> None:
    widths = iter([5, 20, 20, 20])
    wrap = WordWrap(lambda: next(widths))
    assert wrap.feed("aaa bbb ccc ddd ") == "aaa\nbbb ccc ddd"
