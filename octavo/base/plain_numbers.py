"""Conversion of numpy's and torch's numbers, which callers may pass, to Python's own."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

_OWN = frozenset({int, float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """Return a number or boolean of numpy or torch (an array of no dimensions too) as Python's;
    anything else unchanged."""
    if type(value) in _OWN:
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, numbers.Integral) and type(value) is not bool:
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    return value


def plain_list(values: Iterable[Any]) -> Iterable[Any]:
    """Return arrays of numpy or torch as (nested) lists; anything else unchanged."""
    to_list = getattr(values, "tolist", None)
    if hasattr(values, "shape") and callable(to_list):
        listed: Iterable[Any] = to_list()
        return listed
    return values
