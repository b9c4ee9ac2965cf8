"""Patterns by which a quantization config names modules."""

from __future__ import annotations

from octavo.base.fields import Fields
from octavo.base.linear_regex import Pattern, PatternCompiler, PatternError


def pattern_of(fields: Fields, name: str, text: str, compiler: PatternCompiler) -> Pattern:
    """Compile the regular expression in the field ``name``.

    Args:
        compiler: that of all patterns of the file.

    Raises:
        ModelFileError: the pattern is invalid, or :mod:`octavo.base.linear_regex` refuses it; names
            the pattern and its file.
    """
    try:
        return compiler.compile(text)
    except PatternError as error:
        reason = f"{text!r:.80} is not a regular expression that octavo takes: {error}"
        raise fields.error(name, reason) from None
