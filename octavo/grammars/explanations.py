"""Errors of llguidance as those of a request: what is wrong, where, and of which kind."""

from __future__ import annotations

import json
import re
from itertools import islice

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.gbnf import is_gbnf
from octavo.grammars.json_schema import parse_schema, reachable
from octavo.grammars.sources import GrammarSource
from octavo.grammars.vocabulary import byte_vocabulary

# Schemas within a schema of which one may be the cause of an error.
_MAX_SUSPECTS = 200
_MAX_CHARS = 400

_UNSATISFIABLE = "Unsatisfiable schema"
_REASONS = (
    ("unsatisfiable", r"unsatisfiable|regex is empty|^NoExtension|^$"),
    ("too_complex", r"too |limit|unable to determine|ParserTooComplex|LexerTooComplex|nest"),
    ("unsupported", r"unimplemented|failed to generate|unknown format|supported|not disjoint"),
)
# "    (a", "    ^", "error: unclosed group"
_IN_REGEX = re.compile(
    r"regex parse error:\s*\n(?P<text> {4}.*)\n(?P<mark> *\^+)[ ^]*\nerror: (?P<message>[^\n]*)"
)
_IN_LARK = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def explained(error: str, source: GrammarSource, asked: StructuredOutputs) -> ConstraintError:
    """Return the error of a request whose grammar llguidance does not take.

    Args:
        error: its own; empty, or "NoExtension...", where no token may come first.
    """
    kind, text = asked.constraint
    field = f"structured_outputs.{kind}"
    reason = _reason_of(error)
    if reason == "unsatisfiable" and _is_writable(source):
        message = "asks for what cannot be written in the model's tokens"
        return ConstraintError(message, field, "unwritable")
    place = "#"
    if kind == "json":
        place, error = _innermost(error, text)
    is_whole = kind == "grammar" and asked.begins_after is None and not is_gbnf(text)
    message = _message(error, is_whole=is_whole)
    if place != "#":
        message = f"at {place}: {message}"
    if reason == "unsatisfiable":
        message = f"no text can satisfy it: {message}" if message else "no text can satisfy it"
    return ConstraintError(message[:_MAX_CHARS], field, reason)


def _reason_of(error: str) -> str:
    for reason, pattern in _REASONS:
        if re.search(pattern, error, re.IGNORECASE):
            return reason
    return "invalid"


def _message(error: str, *, is_whole: bool) -> str:
    """Return an error in one line.

    Args:
        is_whole: lines and columns are those of the grammar that was asked for.
    """
    if error.startswith("NoExtension"):
        return ""
    if found := _IN_REGEX.search(error):
        at = len(found["mark"]) - len(found["mark"].lstrip()) - 4
        return f"{found['message']}, at character {at} of {found['text'][4:]!r:.120}"
    line = error.partition("\n")[0].strip()
    if place := _IN_LARK.match(line):
        where = f"line {place[1]}, column {place[2]}: " if is_whole else ""
        return where + line[place.end() :]
    return line


def _is_writable(source: GrammarSource) -> bool:
    """Return whether a model whose tokens are all bytes could write it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    start = LLMatcher(byte_vocabulary().tokens, source.text, log_level=0, limits=limits)
    return not start.is_error() and any(start.compute_bitmask()) and not start.is_error()


def _innermost(error: str, text: str) -> tuple[str, str]:
    """Return the pointer to the innermost schema that has such an error by itself, and its error.

    A schema that nothing satisfies is often that because of one in it.
    """
    from llguidance import LLMatcher

    parsed = parse_schema(text)
    shared = {key: parsed.schema[key] for key in ("$defs",) if key in parsed.schema}
    place, first = "#", error.partition("\n")[0]
    for pointer, part in islice(reachable(parsed), _MAX_SUSPECTS):
        source = LLMatcher.grammar_from_json_schema(json.dumps({**shared, **part}))
        found: str = LLMatcher.validate_grammar(source)
        is_cause = found.startswith(_UNSATISFIABLE) and first.startswith(_UNSATISFIABLE)
        if (is_cause and pointer.startswith(place)) or (first and found.startswith(first)):
            place, error = pointer, found
    return place, error
