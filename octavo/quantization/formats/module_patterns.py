"""Patterns by which a quantization config names modules."""

from __future__ import annotations

from octavo.base.fields import Fields
from octavo.base.linear_regex import Pattern, PatternCompiler, PatternError


def pattern_of(fields: Fields, name: str, text: str, compiler: PatternCompiler) -> Pattern:
    """A regular expression that stands in the field ``name``.

    The fields' own error, with the pattern and its file, if it is none or is one of those that
    :mod:`octavo.base.linear_regex` refuses. ``compiler`` is the one of all patterns of the file.
    """
    try:
        return compiler.compile(text)
    except PatternError as error:
        reason = f"{text!r:.80} is not a regular expression that octavo takes: {error}"
        raise fields.error(name, reason) from None
