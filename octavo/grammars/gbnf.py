"""Grammars in GBNF, llama.cpp's notation, as llguidance's translation into Lark's reads them.

That translation knows fewer escapes, takes rules of some names for others, and does not say where a
rule that is missing is used.
"""

from __future__ import annotations

import re

from octavo.base.errors import ConstraintError

_TOKEN = re.compile(
    r"""
      (?P<comment>\#[^\n]*)
    | (?P<literal>"(?:\\.|[^"\\])*")
    | (?P<class>\[(?:\\.|[^\]\\])*\])
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<repetition>\{[^{}]*\})
    | (?P<is>::=)
    | (?P<space>\s+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_IS_GBNF = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF, and not in Lark's notation."""
    return _IS_GBNF.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """Return a grammar in GBNF in Lark's notation.

    Raises:
        ConstraintError: it is none, or too deep; says where.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_simplified(grammar))
    except RecursionError:
        raise ConstraintError("is nested too deep", None, "too_complex") from None
    except ConstraintError:
        raise
    except Exception as error:
        raise ConstraintError(f"is no grammar in GBNF: {error}") from None
    return lark


def _simplified(grammar: str) -> str:
    """Return the grammar with rules named by numbers, and with escapes that all readers know."""
    numbers: dict[str, int] = {}
    used: dict[str, int] = {}
    defined: set[str] = set()
    parts: list[str] = []
    last: str | None = None  # the name that may be that of a definition
    for found in _TOKEN.finditer(grammar):
        kind, text = found.lastgroup, found[0]
        if kind == "literal":
            parts.append('"' + "".join(map(_in_literal, _characters(text[1:-1], found))) + '"')
        elif kind == "class":
            negation = "^" if text.startswith("[^") else ""
            inner = text[1 + len(negation) : -1]
            parts.append(f"[{negation}{_class(inner, found)}]")
        elif kind == "name":
            number = numbers.setdefault(text, len(numbers))
            used.setdefault(text, found.start())
            last = text
            parts.append("root" if text == "root" else f"r{number}")
        else:
            if kind == "is" and last is not None:
                defined.add(last)
            elif kind == "other" and text in '"[':
                raise _error(grammar, found.start(), f"{text} has no end")
            parts.append(text)
        if kind not in ("name", "space", "comment"):
            last = None
    for name, at in used.items():
        if name not in defined:
            raise _error(grammar, at, f"there is no rule {name!r}")
    if "root" not in defined:
        raise ConstraintError("has no rule 'root'")
    return "".join(parts)


def _characters(text: str, found: re.Match[str]) -> list[tuple[str, bool]]:
    """Return the characters of a literal or a class, each with whether it was escaped."""
    characters = []
    for each in _CHARACTER.finditer(text):
        code = each[1] or each[2] or each[3]
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise _error(found.string, found.start(), f"{each[0]} is no character")
            characters.append((chr(number), True))
        elif each[4] is not None:
            if each[4] in "xuU" or (each[4].isalnum() and each[4] not in _ESCAPES):
                raise _error(found.string, found.start(), f"there is no escape {each[0]!r}")
            characters.append((_ESCAPES.get(each[4], each[4]), True))
        else:
            characters.append((each[5], False))
    return characters


def _in_literal(character: tuple[str, bool]) -> str:
    text = character[0]
    if text in '"\\':
        return f"\\{text}"
    return f"\\x{ord(text):02x}" if ord(text) < 32 else text


def _class(inner: str, found: re.Match[str]) -> str:
    characters = _characters(inner, found)
    parts = []
    for index, (text, is_escaped) in enumerate(characters):
        is_range = text == "-" and not is_escaped and 0 < index < len(characters) - 1
        if is_range or text.isalnum() or ord(text) > 127:
            parts.append(text)
        else:
            parts.append(f"\\x{ord(text):02x}")
    return "".join(parts)


def _error(grammar: str, at: int, message: str) -> ConstraintError:
    line = grammar.count("\n", 0, at) + 1
    column = at - grammar.rfind("\n", 0, at)
    return ConstraintError(f"line {line}, column {column}: {message}")
