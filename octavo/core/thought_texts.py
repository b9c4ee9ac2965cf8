"""`ThoughtTexts`, the texts around the thoughts of one answer, for which a budget holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ThoughtTexts:
    """The texts around the thoughts of one answer, in which a budget is kept.

    Args:
        begin: the text with which a thought begins.
        ends: texts with which it ends: its own tag, and the openers of tool calls that no thought
            speaks of.
        closing: what closes it when the budget is spent; one of the ends is in it.
        begins_inside: whether the answer begins within a thought.
    """

    begin: str
    ends: tuple[str, ...]
    closing: str
    begins_inside: bool = False

    @classmethod
    def of(cls, values: Any) -> ThoughtTexts:
        """Return the object of a mapping with the same fields; an object is returned as it is."""
        if isinstance(values, cls):
            return values
        return cls(**{**values, "ends": tuple(values["ends"])})
