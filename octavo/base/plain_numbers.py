"""Numbers of other libraries as Python's own: what numpy and torch hand out is as good as these."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

_OWN = frozenset({int, float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """A number or boolean of numpy or torch (an array of no dimensions too) as Python has it;
    anything else as it is."""
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
    """Arrays of numpy or torch as (nested) lists; anything else as it is."""
    to_list = getattr(values, "tolist", None)
    if hasattr(values, "shape") and callable(to_list):
        listed: Iterable[Any] = to_list()
        return listed
    return values
