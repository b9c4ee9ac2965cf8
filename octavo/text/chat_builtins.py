"""The tests (``x is ...``) and the global functions that a chat template may use.

They are Jinja's, within the budget, and transformers' ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import tests
from jinja2.utils import Namespace, pass_context

from octavo.base.errors import ChatTemplateError
from octavo.text.chat_budget import MAX_RANGE, Budget, ChatContext
from octavo.text.chat_filters import check_number, compared

_MAX_DATE_FORMAT = 256


def _jinja_test(name: str) -> Callable[..., Any]:
    return tests.TESTS[name]  # type: ignore[return-value]


def _comparison(name: str) -> Callable[..., bool]:
    compare = _jinja_test(name)

    def apply(context: ChatContext, value: Any, other: Any) -> bool:
        return bool(compare(compared(context, value), compared(context, other)))

    return apply


def _casing(name: str) -> Callable[..., bool]:
    def apply(context: ChatContext, value: Any) -> bool:
        text = context.budget.text(value)
        context.budget.scan(text)
        return bool(getattr(text, name)())

    return apply


def _arithmetic(name: str) -> Callable[..., bool]:
    test = _jinja_test(name)

    def apply(value: Any, *args: Any) -> bool:
        check_number(value, *args)
        return bool(test(value, *args))

    return apply


class TemplateNamespace(Namespace):
    """Jinja's namespace, without attributes that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_names([name])
        super().__setitem__(name, value)


def _check_attribute_names(names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or name.startswith("_"):
            raise ChatTemplateError("a namespace has an attribute that begins with an underscore")


def _namespace(
    budget: Budget, given: dict[str, Any] | None = None, /, **kwargs: Any
) -> TemplateNamespace:
    if given is not None and not isinstance(given, dict):
        raise TypeError("namespace() takes a dict")
    attributes = {**(given or {}), **kwargs}
    _check_attribute_names(attributes)
    budget.allocate_items(len(attributes))
    return TemplateNamespace(attributes)


def _dict(budget: Budget, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    collected = [budget.collect(value) if not isinstance(value, dict) else value for value in args]
    for pairs in collected:
        budget.measure(pairs)
    made: dict[Any, Any] = dict(*collected, **kwargs)
    budget.allocate_items(2 * len(made))
    return made


def _range(budget: Budget, *args: int) -> range:
    numbers = range(*args)
    if max(map(abs, args)) >> 62 or len(numbers) > MAX_RANGE:
        raise ChatTemplateError(f"range() of more than {MAX_RANGE:,} numbers")
    return numbers


def _raise_exception(budget: Budget, message: Any = "") -> None:
    reason = budget.text(message)[:500]
    raise ChatTemplateError(f"the chat template refused the messages: {reason}")


def _strftime_now(budget: Budget, format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT or re.search(r"%[-_0^#]*\d", format):
        raise ChatTemplateError("strftime_now with a long format or a field width")
    return datetime.now().strftime(format)


_CHEAP_TESTS = """
    boolean defined escaped false float integer iterable mapping none number sameas sequence
    string true undefined
"""
_COMPARISONS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne"
TESTS: dict[str, Callable[..., bool]] = {
    **{name: _jinja_test(name) for name in _CHEAP_TESTS.split()},
    **{name: _arithmetic(name) for name in ("divisibleby", "even", "odd")},
    **{name: pass_context(_comparison(name)) for name in _COMPARISONS.split()},
    "callable": lambda value: callable(value),
    "lower": pass_context(_casing("islower")),
    "upper": pass_context(_casing("isupper")),
}
# Each takes the budget before the template's arguments.
GLOBALS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}
