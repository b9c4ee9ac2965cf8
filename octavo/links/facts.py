"""Facts that two processes must have in common before one computes for the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fact = str | int
Facts = Mapping[str, Fact]

_MAX_FACTS, _MAX_CHARS = 64, 200


def difference(here: Facts, there: Facts) -> str | None:
    """Return in words what differs; None if nothing does."""
    said = [
        f"{name} is {_shown(there, name)} there, and {_shown(here, name)} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    return "; ".join(said) or None


def checked_facts(value: Any) -> dict[str, Fact] | None:
    """Return facts that have come from another process; None if they cannot be some."""
    if not isinstance(value, dict) or len(value) > _MAX_FACTS:
        return None
    for name, fact in value.items():
        is_fact = isinstance(fact, str | int) and len(name) <= _MAX_CHARS
        if not is_fact or len(str(fact)) > _MAX_CHARS:
            return None
    return value


def _shown(facts: Facts, name: str) -> str:
    return str(facts[name]) if name in facts else "not said"
