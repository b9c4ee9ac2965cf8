"""Grammars in which a text may go on for ever, without a choice."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      (?P<comment>//[^\n]*)
    | (?P<text>"(?:\\.|[^"\\])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<rule>[a-z_][a-z_0-9]*|<[^<>\n]*>|@\w+)
    | (?P<space>\s+)
    | (?P<repetition>[*+]|\{\s*\d+\s*,\s*\})
    | (?P<other>.)
    """,
    re.VERBOSE,
)
# Within an expression: what has several characters to choose from, and what is repeated.
_CHOICE = re.compile(r"\.|\\[dwsDWSpP](?:\{[^}]*\})?|\[(?:\^|\\.|[^\\\]])(?:\\.|[^\\\]])+\]")
_REPEATED = re.compile(r"[*+]|\{\d+,\}")


def may_be_endless(lark: str) -> bool:
    """Return whether a terminal of a grammar may repeat one text without end.

    llguidance looks for the end of a text that must come, and there it finds none. It is careful:
    what is repeated must be a rule, or a class of several characters.
    """
    before = ""
    for found in _TOKEN.finditer(lark):
        kind = found.lastgroup or ""
        if kind == "regex" and _repeats_a_text(found[0]):
            return True
        if kind == "repetition" and before != "rule":
            return True
        if kind == "regex" and _CHOICE.fullmatch(found[0].strip("/")):
            kind = "rule"
        if kind not in ("space", "comment"):
            before = kind
    return False


def _repeats_a_text(regex: str) -> bool:
    choices = {found.end() for found in _CHOICE.finditer(regex)}
    return any(found.start() not in choices for found in _REPEATED.finditer(regex))
