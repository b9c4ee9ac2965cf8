"""Constraints that are small enough to be compiled without a trial."""

from __future__ import annotations

import re

from octavo.core.structured_outputs import StructuredOutputs

_MAX_CHARS = 16 << 10
_MAX_DEPTH = 64  # of brackets
# The compiler's stack grows with rules that begin with each other, by some 3 kB each.
_MAX_RULES = 128
# Each may double the one before.
_MAX_TERMINALS = 20
# The states of the lexer are multiplied by these.
_MAX_INTERSECTIONS = 8
_MAX_DIVISOR = 1000

# Keywords of schemas that may make several hold for one value.
_JOINING = ("allOf", "oneOf", "not", "if", "contains", "dependentSchemas", "unevaluatedProperties")

_TERMINAL = re.compile(r"^\s*[A-Z][A-Z0-9_]*\s*:", re.MULTILINE)
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]*)')


def is_small(asked: StructuredOutputs) -> bool:
    """Return whether compiling a constraint cannot overflow a stack, or take long.

    It is for those who ask on their own behalf: somebody who wants to do harm finds small ones that
    take long.
    """
    kind, text = asked.constraint
    if len(text) > _MAX_CHARS or _depth(text) > _MAX_DEPTH:
        return False
    if kind in ("regex", "choice"):
        return True
    return (
        (kind == "json" or text.count(":") <= _MAX_RULES)
        and len(_TERMINAL.findall(text)) <= _MAX_TERMINALS
        and _num_intersections(text) <= _MAX_INTERSECTIONS
        and all(_is_small_number(found) for found in _DIVISOR.findall(text))
    )


def _num_intersections(text: str) -> int:
    """Return how many expressions may have to hold at once."""
    of_schemas = text.count('"pattern"') if any(f'"{key}"' in text for key in _JOINING) else 0
    return of_schemas + text.count("&") + text.count("~")


def _is_small_number(text: str) -> bool:
    try:
        return abs(float(text)) <= _MAX_DIVISOR
    except ValueError:  # no schema, which is found where it is read
        return True


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
