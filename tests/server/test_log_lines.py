"""Whatever a record says, it is one line."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from octavo.server.log_lines import JsonFormatter, TextFormatter

nasty = st.text(
    st.sampled_from("ab\r\n\x00\x1b\x7f\x85\x9b\u2028\u2029\u202e\u2066\ud800{}\"'%\\")
    | st.characters()
)


def text_of(record_to: logging.Formatter, message: str, *arguments, **more) -> str:
    record = logging.LogRecord("octavo", logging.INFO, "", 0, message, arguments, None)
    vars(record).update(more)
    return record_to.format(record)


@given(nasty)
def test_no_text_can_forge_a_line(text):
    line = text_of(TextFormatter(), "said %s", text)
    assert len(line.splitlines()) == 1
    assert not [c for c in line if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")]
    line.encode("utf-8")
    as_json = text_of(JsonFormatter(), "said %s", text, fields={"text": text})
    assert as_json.isascii() and as_json.isprintable()
    assert json.loads(as_json)["text"] == text


def test_a_traceback_cannot_pass_for_lines_of_the_log():
    try:
        raise ValueError("x\n2026-01-01 00:00:00.000 INFO     forged\r\x1b[2J")
    except ValueError:
        error = sys.exc_info()
    first, *others = text_of(TextFormatter(), "broken", exc_info=error).split("\n")
    assert first.endswith("broken") and len(others) >= 3
    assert all(line.startswith("    | ") and line.isprintable() for line in others)
    as_json = json.loads(text_of(JsonFormatter(), "broken", exc_info=error))
    assert "forged" in as_json["exception"]
