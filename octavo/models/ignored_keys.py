"""Conditions under which a key of a model's config can be ignored.

A family declares with these the keys that no reader asks for (`Family.hf_ignored`,
`Family.gguf_ignored`); ``unread_keys.py`` refuses all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Meaningless = Callable[[Any, Mapping[str, Any]], bool]
"""True if a value of a key changes nothing, given the values of all keys of its file."""


def always(value: Any, values: Mapping[str, Any]) -> bool:
    """Any value can be ignored."""
    return True


def only(*meaningless: Any) -> Meaningless:
    """These values can be ignored, others not."""
    return lambda value, values: value in meaningless


def same_as(name: str) -> Meaningless:
    """A value can be ignored if it is that of the key ``name``."""
    return lambda value, values: value == values.get(name)


def beside(name: str) -> Meaningless:
    """A value can be ignored if the key ``name`` is there."""
    return lambda value, values: values.get(name) is not None


def without(name: str) -> Meaningless:
    """A value can be ignored unless the key ``name`` is true."""
    return lambda value, values: not values.get(name)
