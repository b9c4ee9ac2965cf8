from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from octavo.cli import UsageError
from octavo.cli.flags import read_text


def test_a_text_is_as_it_is_in_the_file(tmp_path):
    """A carriage return is a character like others, to a tokenizer."""
    path = tmp_path / "a"
    path.write_bytes("\ufeffé\r\nb\n".encode())
    assert read_text(str(path), "--text") == "\ufeffé\r\nb\n"


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\r\n")))
    assert read_text("-", "--text") == "a\r\n"


def test_what_cannot_be_read_is_wrong_usage(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(UsageError, match=r"--text .*a: No such file"):
        read_text(str(path), "--text")
    path.write_bytes(b"ab\xff")
    with pytest.raises(UsageError, match=r"--text .*a: not UTF-8 text, at byte 2: invalid start"):
        read_text(str(path), "--text")
