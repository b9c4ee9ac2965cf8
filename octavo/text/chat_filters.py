"""The filters, tests and global functions that a chat template may use.

Same names and results as Jinja's, but within the budget, and with ``tojson`` as transformers has it
(no HTML escapes). Left out, because no chat template needs them and they reach further than text:
filesizeformat, forceescape, pprint, random, striptags, urlencode, urlize, wordwrap, xmlattr; and
the globals cycler, joiner and lipsum. ``safe`` changes nothing here: there is no autoescaping.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import filters, tests
from jinja2.exceptions import FilterArgumentError
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace, pass_context

from octavo.errors import ChatTemplateError
from octavo.text import chat_operators as operators
from octavo.text.chat_budget import MAX_RANGE, Budget, is_scalar

_MAX_ATTRIBUTE_PATH = 1000
_MAX_INDENT = 64
_MAX_SEPARATOR = 16
_MAX_DATE_FORMAT = 256
_MAX_SORT_WORK = 4 << 20


# -- text -----------------------------------------------------------------------------------------


def _by_method(name: str) -> Callable[..., Any]:
    """A filter that is a method of str."""
    method = operators.METHODS[str][name]

    def apply(context: Context, value: Any, *args: Any) -> Any:
        budget = context.budget
        return method(context.environment, budget, budget.text(value), *args)

    return apply


def _trim(context: Context, value: Any, chars: str | None = None) -> str:
    return _by_method("strip")(context, value, chars)


def _title(context: Context, value: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(len(text))
    context.budget.allocate_items(len(text) // 2 + 1, new=True)
    return filters.do_title(text)


def _center(context: Context, value: Any, width: int = 80) -> str:
    return _by_method("center")(context, value, width)


def _replace(
    context: Context, value: Any, old: Any, new: Any, count: int | None = None
) -> str:
    budget = context.budget
    texts = (budget.text(value), budget.text(old), budget.text(new))
    return operators.replace(context.environment, budget, *texts, -1 if count is None else count)


def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = context.budget.text(value)
    columns = len(width) if isinstance(width, str) else max(width, 0)
    lines = len(text.splitlines()) + 1
    context.budget.allocate_items(lines, new=True)
    context.budget.allocate(len(text) + columns * lines)
    return filters.do_indent(text, width, first, blank)


def _truncate(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(2 * len(text))
    return filters.do_truncate(context.environment, text, *args, **kwargs)


def _wordcount(context: Context, value: Any) -> int:
    text = context.budget.text(value)
    context.budget.scan(text)
    return sum(1 for _ in context.budget.iterate(re.finditer(r"\w+", text)))


def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise FilterArgumentError("format takes positional or keyword arguments, not both")
    budget = context.budget
    return operators.printf(budget, budget.text(value), kwargs or args)


def _string(context: Context, value: Any) -> str:
    return context.budget.text(value)


def _escape(context: Context, value: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(5 * len(text))
    return str(filters.FILTERS["escape"](text))


def concat(context: Context, parts: list[Any]) -> str:
    """The ``~`` operator."""
    texts = [context.budget.text(part) for part in parts]
    context.budget.allocate(sum(map(len, texts)))
    return "".join(texts)


def _join(
    context: Context, values: Iterable[Any], separator: Any = "", attribute: Any = None
) -> str:
    budget = context.budget
    if attribute is not None:
        values = map(_getter(context, attribute), values)
    texts = (budget.text(value) for value in values)
    return operators.join(context.environment, budget, budget.text(separator), texts)


def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget = context.budget
    columns = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    if columns > _MAX_INDENT or any(len(part) > _MAX_SEPARATOR for part in separators or ()):
        raise ChatTemplateError("tojson with a very long indent or separator")
    characters = budget.measure(value, to_print=True, indent=columns)
    budget.allocate(characters + 32 * bool(separators) * (characters // 4))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# -- numbers --------------------------------------------------------------------------------------


def _int(context: Context, value: Any, default: int = 0, base: int = 10) -> int:
    context.budget.scan(value)
    number = filters.do_int(value, default, base)
    operators.binary(context.budget, "*", number, 1)  # refuses what is out of bounds
    return number


def _float(context: Context, value: Any, default: float = 0.0) -> float:
    context.budget.scan(value)
    return filters.do_float(value, default)


def _round(context: Context, value: Any, precision: int = 0, method: str = "common") -> Any:
    _check_number(value, precision)
    if method not in ("common", "ceil", "floor"):
        raise FilterArgumentError("method must be common, ceil or floor")
    if abs(precision) > 100:
        raise ChatTemplateError("round with a precision beyond 100 digits")
    if method == "common":
        return round(value, precision)
    return getattr(math, method)(value * 10**precision) / 10**precision


def _abs(context: Context, value: Any) -> Any:
    _check_number(value)
    return abs(value)


def _check_number(*values: Any) -> None:
    """Text also has ``*`` and ``%``, with other costs."""
    for value in values:
        if not isinstance(value, (int, float)):
            raise TypeError(f"expected a number, got {type(value).__name__}")


def _sum(context: Context, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        values = map(_getter(context, attribute), values)
    total = start
    for value in context.budget.iterate(values):
        total = operators.binary(context.budget, "+", total, value)
    return total


# -- lists and dicts ------------------------------------------------------------------------------


def _getter(context: Context, attribute: Any, default: Any = None) -> Callable[[Any], Any]:
    _check_path(attribute)
    return filters.make_attrgetter(context.environment, attribute, default=default)


def _check_path(attribute: Any) -> None:
    if isinstance(attribute, str) and len(attribute) > _MAX_ATTRIBUTE_PATH:
        raise ChatTemplateError("the chat template uses a very long attribute name")


def _length(context: Context, value: Any) -> int:
    return len(value)


def _first(context: Context, values: Iterable[Any]) -> Any:
    for value in values:
        return value
    return context.environment.undefined("No first item, sequence was empty.")


def _last(context: Context, values: Any) -> Any:
    for value in reversed(values):
        return value
    return context.environment.undefined("No last item, sequence was empty.")


def _list(context: Context, values: Iterable[Any]) -> list[Any]:
    return context.budget.collect(values)


def _reverse(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        context.budget.allocate(len(value))
        return value[::-1]
    return reversed(context.budget.collect(value))


def _items(context: Context, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Undefined):
        return iter(())
    if not isinstance(value, Mapping):
        raise TypeError("Can only get item pairs from a mapping.")
    return context.budget.iterate(value.items())


def _batch(context: Context, values: Iterable[Any], count: int, fill: Any = None) -> Any:
    context.budget.allocate_items(max(count, 0))
    for group in filters.do_batch(context.budget.iterate(values), count, fill):
        context.budget.allocate_items(len(group))
        yield group


def _slice_filter(context: Context, values: Iterable[Any], count: int, fill: Any = None) -> Any:
    context.budget.allocate_items(max(count, 0))
    for group in filters.sync_do_slice(context.budget.collect(values), count, fill):
        context.budget.allocate_items(len(group))
        yield group


def _ordering(name: str) -> Callable[..., Any]:
    """sort, groupby, unique, min, max, dictsort: they compare items with each other."""
    implementation = {
        "groupby": filters.sync_do_groupby,
        "unique": filters.sync_do_unique,
        "sort": filters.do_sort,
        "min": filters.do_min,
        "max": filters.do_max,
    }.get(name)

    def apply(context: Context, values: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        for argument in (*args, *kwargs.values()):
            _check_path(argument)
        if isinstance(values, Undefined) or name == "dictsort":
            items = values
            count = len(values) if isinstance(values, dict) else 0
            weight = budget.measure(values)
        else:
            items = budget.collect(values)
            count = len(items)
            weight = sum(4 + budget.measure(item) for item in items)
        if weight // 32 * (1 + count.bit_length()) > _MAX_SORT_WORK:
            raise ChatTemplateError(f"the chat template uses {name} on too much data")
        budget.work(weight // 8)
        budget.allocate(min(weight, 1 << 20))  # keys in lower case
        budget.allocate_items(count, new=True)
        if implementation is None:
            return filters.do_dictsort(items, *args, **kwargs)
        result = implementation(context.environment, items, *args, **kwargs)
        return list(result) if name == "unique" else result

    return apply


def _mapping(context: Context, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    _check_path(kwargs.get("attribute"))
    if values:
        apply = filters.prepare_map(context, args, kwargs)
        for value in context.budget.iterate(values):
            yield apply(value)


def _selecting(keep: bool, by_attribute: bool) -> Callable[..., Any]:
    """select, reject, selectattr and rejectattr."""
    modify: Callable[[Any], Any] = (lambda x: x) if keep else operator.not_

    def apply(context: Context, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if by_attribute and args:
            _check_path(args[0])
        counted = context.budget.iterate(values) if values else ()
        return filters.select_or_reject(context, counted, args, kwargs, modify, by_attribute)

    return apply


def _default(context: Context, value: Any, default: Any = "", boolean: bool = False) -> Any:
    return filters.do_default(value, default, boolean)


def _attr(context: Context, value: Any, name: str) -> Any:
    return filters.do_attr(context.environment, value, name)


def _same(context: Context, value: Any) -> Any:
    return value


# -- what the compiler inserts (see chat_sandbox): names that a template cannot write --------------


def _tick(context: Context, characters: int) -> bool:
    """One more turn of a loop or a macro, which may put so much fixed text into a buffer."""
    context.budget.work(4)
    if characters:
        context.budget.allocate(characters)
    return True


def _new(context: Context, value: Any) -> Any:
    """A list, tuple or dict that an expression has just made."""
    context.budget.allocate_items(len(value))
    if isinstance(value, dict) and not all(map(is_scalar, value)):
        raise ChatTemplateError("the keys of a dict must be text or numbers")
    return value


def _slice(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    if isinstance(value, str):
        context.budget.allocate(len(value))
    elif isinstance(value, (list, tuple)):
        context.budget.allocate_items(len(value))
    return value[slice(start, stop, step)]


def _compared(context: Context, value: Any) -> Any:
    """An operand of a comparison."""
    if not is_scalar(value) or isinstance(value, str):
        context.budget.measure(value)
    return value


# -- tests and globals ----------------------------------------------------------------------------


def _comparison(name: str) -> Callable[..., bool]:
    compare = tests.TESTS[name]

    def apply(context: Context, value: Any, other: Any) -> bool:
        return bool(compare(_compared(context, value), _compared(context, other)))

    return apply


def _casing(name: str) -> Callable[..., bool]:
    def apply(context: Context, value: Any) -> bool:
        text = context.budget.text(value)
        context.budget.scan(text)
        return getattr(text, name)()

    return apply


def _arithmetic(name: str) -> Callable[..., bool]:
    test = tests.TESTS[name]

    def apply(value: Any, *args: Any) -> bool:
        _check_number(value, *args)
        return test(value, *args)

    return apply


class TemplateNamespace(Namespace):
    """Jinja's namespace, without attributes that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_names([name])
        super().__setitem__(name, value)


def _check_attribute_names(names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or name.startswith("_"):
            raise ChatTemplateError(f"a namespace cannot have an attribute {name!r:.40}")


def _namespace(budget: Budget, *args: Any, **kwargs: Any) -> TemplateNamespace:
    attributes = dict(*args, **kwargs)
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
    raise ChatTemplateError(f"the chat template refused the messages: {message!s:.500}")


def _strftime_now(budget: Budget, format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT or re.search(r"%[-_0^#]*\d", format):
        raise ChatTemplateError("strftime_now with a long format or a field width")
    return datetime.now().strftime(format)


_STR_FILTERS = ("capitalize", "lower", "upper")
FILTERS: dict[str, Callable[..., Any]] = {
    name: pass_context(function)
    for name, function in {
        **{name: _by_method(name) for name in _STR_FILTERS},
        **{n: _ordering(n) for n in ("dictsort", "groupby", "max", "min", "sort", "unique")},
        "abs": _abs,
        "attr": _attr,
        "batch": _batch,
        "center": _center,
        "count": _length,
        "d": _default,
        "default": _default,
        "e": _escape,
        "escape": _escape,
        "first": _first,
        "float": _float,
        "format": _format,
        "indent": _indent,
        "int": _int,
        "items": _items,
        "join": _join,
        "last": _last,
        "length": _length,
        "list": _list,
        "map": _mapping,
        "reject": _selecting(keep=False, by_attribute=False),
        "rejectattr": _selecting(keep=False, by_attribute=True),
        "replace": _replace,
        "reverse": _reverse,
        "round": _round,
        "safe": _same,
        "select": _selecting(keep=True, by_attribute=False),
        "selectattr": _selecting(keep=True, by_attribute=True),
        "slice": _slice_filter,
        "string": _string,
        "sum": _sum,
        "title": _title,
        "tojson": _tojson,
        "trim": _trim,
        "truncate": _truncate,
        "wordcount": _wordcount,
        "~compared": _compared,
        "~concat": concat,
        "~new": _new,
        "~slice": _slice,
        "~tick": _tick,
    }.items()
}
_CHEAP_TESTS = """
    boolean defined escaped false filter float integer iterable mapping none number sameas sequence
    string test true undefined
"""
_COMPARISONS = (
    "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne"
)
TESTS: dict[str, Callable[..., bool]] = {
    **{name: tests.TESTS[name] for name in _CHEAP_TESTS.split()},
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
