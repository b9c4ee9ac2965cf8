"""Expressions of JSON schemas as llguidance reads them rightly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.grammars.vocabulary import byte_vocabulary

# Characters that JSON has as codes alone (``\u0001``), which answers do not have: a name that is
# spelled in codes would pass for another one.
_CODES = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_UNWRITABLE = re.compile(f"[{_CODES}]")
_NOTHING = "[a&&b]"
# Well-known expressions that look around: pydantic's of a Decimal.
_SAME = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}
# A character by its code, another escape, an opening bracket that negates, or any other bracket.
_PIECE = re.compile(
    rf"\\x([0-9a-fA-F]{{2}})|\\u([0-9a-fA-F]{{4}})|\\[xu]\{{([0-9a-fA-F]+)\}}|\\.|\[\^\]?|[\[\]]"
    rf"|[{_CODES}]",
    re.DOTALL,
)


def is_writable(value: Any) -> bool:
    """Return whether all texts in a JSON value can be written without codes of characters."""
    if isinstance(value, str):
        return not _UNWRITABLE.search(value)
    if isinstance(value, list):
        return all(map(is_writable, value))
    return not isinstance(value, dict) or all(map(is_writable, value.values()))


def writable(pattern: str) -> str:
    r"""Return an expression of those of its texts that can be written without codes.

    llguidance 1.9 leaves the other characters out of a text, and takes the escapes of quotes and of
    backslashes for characters of each class that has all control characters: ``[^"]`` would allow
    ``\"``.
    """
    pattern = _SAME.get(pattern, pattern)
    parts: list[str] = []
    at = depth = 0
    begin = -1  # where a class that does not negate begins
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        parts.append(pattern[at : found.start()])
        at = found.end()
        if piece.startswith("[^") and not depth:
            parts.append(rf"[^{_CODES}" + piece[2:].replace("]", r"\]"))  # it is a character there
            depth = 1
            continue
        if piece[0] == "[":
            if not depth:
                begin = len(parts)
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
            if not depth and begin >= 0:
                inner = "".join(parts[begin:])
                if r"\x" in inner or r"\u" in inner or _UNWRITABLE.search(inner):
                    parts[begin:] = [f"[{inner}", rf"]--[{_CODES}]"]
                begin = -1
        elif not depth:
            code = found[1] or found[2] or found[3]
            character = chr(min(int(code, 16), 0x10FFFF)) if code else piece
            if _UNWRITABLE.fullmatch(character):
                piece = _NOTHING
        parts.append(piece)
    return "".join(parts) + pattern[at:]


def matches(pattern: str, text: str) -> bool:
    """Return whether an expression is found in a text, in time that grows with these alone.

    Raises:
        ConstraintError: it cannot be followed.
    """
    from llguidance import LLMatcher

    vocabulary = byte_vocabulary()
    schema = json.dumps({"type": "string", "pattern": writable(pattern)})
    matcher = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if matcher.is_error():
        message = f"the pattern {pattern!r:.60} cannot be followed"
        raise ConstraintError(message, None, "unsupported")
    written = [
        *json.dumps(text, ensure_ascii=False).encode(errors="replace"),
        *vocabulary.stop_token_ids,
    ]
    return int(matcher.validate_tokens(written)) == len(written)


def pattern_of_others(texts: Iterable[str]) -> str:
    """Return an expression of all texts but some."""
    return writable(f"^{_others(sorted(set(texts)), 0)}$")


def _others(texts: list[str], at: int) -> str:
    """Return an expression of what may follow the first ``at`` characters, which all have."""
    is_end = any(len(text) == at for text in texts)
    below: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > at:
            below.setdefault(text[at], []).append(text)
    options = [] if is_end else [""]
    heads = "".join(rf"\x{{{ord(each):x}}}" for each in below)
    options.append(f"[^{heads}](?s:.*)" if heads else "(?s:.+)")
    options += [rf"\x{{{ord(c):x}}}{_others(each, at + 1)}" for c, each in below.items()]
    return f"({'|'.join(options)})"
