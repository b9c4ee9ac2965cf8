"""The operators and the methods that a chat template may use, each within the budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from octavo.base.errors import ChatTemplateError
from octavo.text.chat_budget import MAX_INT_BITS, MAX_TEXT, Budget, is_scalar

_MAX_QUADRATIC = 1 << 27  # of len(text) * len(part) where CPython searches naively
_MAX_FIELD_WIDTH = 9999
_PRINTF = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[-+ #0]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?", re.DOTALL
)

Method = Callable[..., Any]


# -- operators ------------------------------------------------------------------------------------


def binary(budget: Budget, operator: str, left: Any, right: Any) -> Any:
    """``left operator right``, refused when the result would be too large."""
    budget.work()
    if operator == "+":
        return _add(budget, left, right)
    if operator == "*":
        return _multiply(budget, left, right)
    if operator == "**":
        return _power(left, right)
    if operator == "%":
        return printf(budget, left, right) if isinstance(left, str) else left % right
    return SandboxedEnvironment.default_binop_table[operator](left, right)


def _add(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget.allocate(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.allocate_items(len(left) + len(right))
    return left + right


def _multiply(budget: Budget, left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(sequence, str):
            budget.allocate(len(sequence) * max(count, 0))
        elif isinstance(count, int) and isinstance(sequence, (list, tuple)):
            budget.allocate_items(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise ChatTemplateError(f"the chat template makes an integer of {bits} bits")


def printf(budget: Budget, template: str, values: Any) -> str:
    """``template % values`` with bounded widths."""
    budget.scan(template)
    given = values if isinstance(values, tuple) else (values,)
    largest = max((budget.measure(v, to_print=True) for v in given), default=0)
    total = len(template) + sum(budget.measure(v) for v in given)
    for match in budget.iterate(_PRINTF.finditer(template)):
        widths = (match["width"], match["precision"])
        if "*" in widths:
            raise ChatTemplateError("the chat template takes a field width from a value")
        total += sum(_checked_width(width) for width in widths if width)
        if match["key"] is not None:
            total += largest
        if total > MAX_TEXT:
            break
    budget.allocate(total)
    text: str = template % values
    return text


def _checked_width(digits: str) -> int:
    if len(digits) > len(str(_MAX_FIELD_WIDTH)) or int(digits) > _MAX_FIELD_WIDTH:
        raise ChatTemplateError(f"the chat template pads a field to {digits[:20]} characters")
    return int(digits)


class _Formatter(SandboxedFormatter):
    """``str.format``: attributes through the sandbox, sizes through the budget."""

    def __init__(self, environment: Any, budget: Budget):
        super().__init__(environment)
        self._budget = budget

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            _checked_width(digits)
        self._budget.measure(value, to_print=True)
        text = format(value, format_spec)
        self._budget.allocate(len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.allocate(self._budget.measure(value, to_print=True))
        return super().convert_field(value, conversion)


# -- methods --------------------------------------------------------------------------------------
# Each takes (environment, budget, owner, *arguments); what is not listed does not exist.


def _scanning(name: str) -> Method:
    """A str method that goes through its text once and returns nothing longer than it (much)."""
    method = getattr(str, name)

    def call(environment: Any, budget: Budget, text: str, *args: Any) -> Any:
        budget.scan(text)
        for argument in args:
            budget.measure(argument)
        result = method(text, *args)
        if isinstance(result, str):
            budget.allocate(len(result))
        return result

    return call


def _naive(name: str) -> Method:
    """A str method whose time may be the product of two lengths."""
    method = _scanning(name)

    def call(environment: Any, budget: Budget, text: str, *args: Any) -> Any:
        for argument in args:
            if isinstance(argument, str) and len(text) * len(argument) > _MAX_QUADRATIC:
                raise ChatTemplateError(f"the chat template calls {name}() with two long texts")
        return method(environment, budget, text, *args)

    return call


def _split(name: str) -> Method:
    """split and its kin: a list of at most as many parts as there are separators, plus one."""
    method = getattr(str, name)

    def call(environment: Any, budget: Budget, text: str, *args: Any, **kwargs: Any) -> list[str]:
        separator = args[0] if args else kwargs.get("sep")
        budget.scan(text, separator)
        if isinstance(separator, str) and separator:
            if name == "rsplit" and len(text) * len(separator) > _MAX_QUADRATIC:
                raise ChatTemplateError("the chat template calls rsplit() with two long texts")
            parts = text.count(separator) + 1
        else:
            parts = len(text) // 2 + 1
        limit = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
        if isinstance(limit, int) and limit >= 0:
            parts = min(parts, limit + 1)
        budget.allocate(len(text))
        budget.allocate_items(parts, new=True)
        result: list[str] = method(text, *args, **kwargs)
        return result

    return call


def _splitlines(environment: Any, budget: Budget, text: str, *args: Any, **kwargs: Any) -> Any:
    budget.allocate(len(text))
    budget.allocate_items(text.count("\n") + 1, new=True)
    return text.splitlines(*args, **kwargs)


def _padding(name: str) -> Method:
    method = getattr(str, name)

    def call(environment: Any, budget: Budget, text: str, width: int, *fill: str) -> str:
        budget.allocate(max(len(text), width))
        padded: str = method(text, width, *fill)
        return padded

    return call


def replace(
    environment: Any, budget: Budget, text: str, old: str, new: str, count: int = -1
) -> str:
    """``text.replace(old, new, count)``, its result measured first."""
    budget.scan(text, old)
    found = text.count(old)
    found = found if count is None or count < 0 else min(found, count)
    budget.allocate(len(text) + found * max(len(new) - len(old), 0))
    return text.replace(old, new, -1 if count is None else count)


def join(environment: Any, budget: Budget, separator: str, values: Any) -> str:
    """``separator.join(values)``; only strings can be joined."""
    items = budget.collect(values)
    total = sum(len(item) for item in items if isinstance(item, str))
    budget.allocate(total + len(separator) * len(items))
    return separator.join(items)


def _format(environment: Any, budget: Budget, text: str, *args: Any, **kwargs: Any) -> str:
    budget.scan(text)
    return _Formatter(environment, budget).vformat(text, args, kwargs)


def _format_map(environment: Any, budget: Budget, text: str, mapping: dict[str, Any]) -> str:
    return _format(environment, budget, text, **mapping)


def _sequence(name: str) -> Method:
    def call(environment: Any, budget: Budget, owner: Any, *args: Any) -> Any:
        for value in (owner, *args):
            budget.measure(value)
        return getattr(owner, name)(*args)

    return call


def _dict_get(environment: Any, budget: Budget, owner: Any, key: Any, default: Any = None) -> Any:
    if not is_scalar(key):
        raise SecurityError("a key must be text or a number")
    return owner.get(key, default)


def _dict_view(name: str) -> Method:
    def call(environment: Any, budget: Budget, owner: Any) -> Any:
        return getattr(owner, name)()

    return call


def _copy(environment: Any, budget: Budget, owner: Any) -> Any:
    budget.allocate_items(2 * len(owner))
    return owner.copy()


_SCANNING = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit
    isidentifier islower isnumeric isprintable isspace istitle isupper lower partition removeprefix
    removesuffix startswith swapcase title upper
"""
_STR_METHODS: dict[str, Method] = {
    **{name: _scanning(name) for name in _SCANNING.split()},
    **{n: _naive(n) for n in ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")},
    **{name: _split(name) for name in ("rsplit", "split")},
    **{name: _padding(name) for name in ("center", "ljust", "rjust", "zfill")},
    "format": _format,
    "format_map": _format_map,
    "join": join,
    "replace": replace,
    "splitlines": _splitlines,
}
METHODS: dict[type, dict[str, Method]] = {
    str: _STR_METHODS,
    dict: {
        "copy": _copy,
        "get": _dict_get,
        **{name: _dict_view(name) for name in ("items", "keys", "values")},
    },
    list: {"copy": _copy, "count": _sequence("count"), "index": _sequence("index")},
    tuple: {"count": _sequence("count"), "index": _sequence("index")},
}
