"""The filters that a chat template may use.

Names and results are Jinja's, but within the budget, and ``tojson`` is that of transformers (no
HTML escapes). Left out, because no chat template needs them and they reach further than text:
filesizeformat, forceescape, pprint, random, striptags, urlencode, urlize, wordwrap, xmlattr.
``safe`` changes nothing here: there is no autoescaping.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import filters
from jinja2.exceptions import FilterArgumentError
from jinja2.runtime import Undefined
from jinja2.utils import pass_context

from octavo.base.errors import ChatTemplateError
from octavo.text import chat_operators as operators
from octavo.text.chat_budget import Budget, ChatContext, is_scalar

_ESCAPABLE = re.compile("[^\x00-\x7e\U000f0000-\U000fffff]+")
_MAX_ATTRIBUTE_PATH = 1000
_MAX_INDENT = 64
_MAX_SEPARATOR = 16
_MAX_SORT_WORK = 4 << 20


# -- text -----------------------------------------------------------------------------------------


def _by_method(name: str, **defaults: Any) -> Callable[..., Any]:
    """A filter that is a method of str, with a default for its argument, if it may have one."""
    method = operators.METHODS[str][name]

    def apply(context: ChatContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= defaults.keys():
            raise TypeError(f"{name} has no argument {', '.join(kwargs.keys() - defaults.keys())}")
        given = args or {**defaults, **kwargs}.values()
        return method(context.environment, context.budget, context.budget.text(value), *given)

    return apply


def _title(context: ChatContext, value: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(len(text))
    context.budget.allocate_items(len(text) // 2 + 1, new=True)
    return filters.do_title(text)


def _replace(context: ChatContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    budget = context.budget
    texts = (budget.text(value), budget.text(old), budget.text(new))
    return operators.replace(context.environment, budget, *texts, -1 if count is None else count)


def _indent(
    context: ChatContext, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = context.budget.text(value)
    columns = len(width) if isinstance(width, str) else max(width, 0)
    lines = len(text.splitlines()) + 1
    context.budget.allocate_items(lines, new=True)
    context.budget.allocate(len(text) + columns * lines)
    return filters.do_indent(text, width, first, blank)


def _truncate(context: ChatContext, value: Any, *args: Any, **kwargs: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(2 * len(text))
    return filters.do_truncate(context.environment, text, *args, **kwargs)


def _escape(context: ChatContext, value: Any) -> str:
    text = context.budget.text(value)
    context.budget.allocate(5 * len(text))
    return str(filters.FILTERS["escape"](text))


def _wordcount(context: ChatContext, value: Any) -> int:
    text = context.budget.text(value)
    context.budget.scan(text)
    return sum(1 for _ in context.budget.iterate(re.finditer(r"\w+", text)))


def _format(context: ChatContext, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise FilterArgumentError("format takes positional or keyword arguments, not both")
    budget = context.budget
    return operators.printf(budget, budget.text(value), kwargs or args)


def _concat(context: ChatContext, parts: list[Any]) -> str:
    """The ``~`` operator."""
    texts = [context.budget.text(part) for part in parts]
    context.budget.allocate(sum(map(len, texts)))
    return "".join(texts)


def _join(
    context: ChatContext, values: Iterable[Any], separator: Any = "", attribute: Any = None
) -> str:
    budget = context.budget
    if attribute is not None:
        values = map(_getter(context, attribute), values)
    texts = (budget.text(value) for value in values)
    return operators.join(context.environment, budget, budget.text(separator), texts)


def _tojson(
    context: ChatContext,
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
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _escape_non_ascii(budget, text) if ensure_ascii else text


def _escape_non_ascii(budget: Budget, text: str) -> str:
    r"""JSON text with ``\u`` escapes.

    The characters that disguise users' text (``special_tokens.Disguise``) stay, to be found again.
    """
    num_bytes = len(text.encode(errors="replace"))
    budget.allocate(len(text) + 5 * (num_bytes - len(text)))

    def escape(run: re.Match[str]) -> str:
        budget.work(8)
        return json.dumps(run[0])[1:-1]

    return _ESCAPABLE.sub(escape, text)


# -- numbers --------------------------------------------------------------------------------------


def _int(context: ChatContext, value: Any, default: int = 0, base: int = 10) -> int:
    context.budget.scan(value)
    number = filters.do_int(value, default, base)
    operators.binary(context.budget, "*", number, 1)  # refuses what is out of bounds
    return number


def _float(context: ChatContext, value: Any, default: float = 0.0) -> float:
    context.budget.scan(value)
    return filters.do_float(value, default)


def _round(context: ChatContext, value: Any, precision: int = 0, method: str = "common") -> Any:
    check_number(value, precision)
    if method not in ("common", "ceil", "floor"):
        raise FilterArgumentError("method must be common, ceil or floor")
    if abs(precision) > 100:
        raise ChatTemplateError("round with a precision beyond 100 digits")
    if method == "common":
        return round(value, precision)
    return getattr(math, method)(value * 10**precision) / 10**precision


def _abs(context: ChatContext, value: Any) -> Any:
    check_number(value)
    return abs(value)


def check_number(*values: Any) -> None:
    """Text also has ``*`` and ``%``, with other costs."""
    for value in values:
        if not isinstance(value, (int, float)):
            raise TypeError(f"expected a number, got {type(value).__name__}")


def _sum(context: ChatContext, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        values = map(_getter(context, attribute), values)
    total = start
    for value in context.budget.iterate(values):
        total = operators.binary(context.budget, "+", total, value)
    return total


# -- lists and dicts ------------------------------------------------------------------------------


def _getter(context: ChatContext, attribute: Any, default: Any = None) -> Callable[[Any], Any]:
    _check_path(attribute)
    return filters.make_attrgetter(context.environment, attribute, default=default)


def _check_path(attribute: Any) -> None:
    if isinstance(attribute, str) and len(attribute) > _MAX_ATTRIBUTE_PATH:
        raise ChatTemplateError("the chat template uses a very long attribute name")


def _list(context: ChatContext, values: Iterable[Any]) -> list[Any]:
    return context.budget.collect(values)


def _reverse(context: ChatContext, value: Any) -> Any:
    if isinstance(value, str):
        context.budget.allocate(len(value))
        return value[::-1]
    return reversed(context.budget.collect(value))


def _items(context: ChatContext, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Undefined):
        return iter(())
    if not isinstance(value, Mapping):
        raise TypeError("Can only get item pairs from a mapping.")
    return context.budget.iterate(value.items())


def _batch(context: ChatContext, values: Iterable[Any], count: int, fill: Any = None) -> Any:
    context.budget.allocate_items(max(count, 0))
    for group in filters.do_batch(context.budget.iterate(values), count, fill):
        context.budget.allocate_items(len(group))
        yield group


def _slice_filter(context: ChatContext, values: Iterable[Any], count: int, fill: Any = None) -> Any:
    context.budget.allocate_items(max(count, 0))
    for group in filters.sync_do_slice(context.budget.collect(values), count, fill):
        context.budget.allocate_items(len(group))
        yield group


def _ordering(name: str) -> Callable[..., Any]:
    """sort, groupby, unique, min, max, dictsort: they compare items with each other."""
    implementations: dict[str, Callable[..., Any]] = {
        "groupby": filters.sync_do_groupby,
        "unique": filters.sync_do_unique,
        "sort": filters.do_sort,
        "min": filters.do_min,
        "max": filters.do_max,
    }
    implementation = implementations.get(name)

    def apply(context: ChatContext, values: Any, *args: Any, **kwargs: Any) -> Any:
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


def _mapping(context: ChatContext, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    _check_path(kwargs.get("attribute"))
    if values:
        apply = filters.prepare_map(context, args, kwargs)
        for value in context.budget.iterate(values):
            yield apply(value)


def _selecting(keep: bool, by_attribute: bool) -> Callable[..., Any]:
    """select, reject, selectattr and rejectattr."""
    modify: Callable[[Any], Any] = (lambda x: x) if keep else operator.not_

    def apply(context: ChatContext, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if by_attribute and args:
            _check_path(args[0])
        counted = context.budget.iterate(values) if values else ()
        return filters.select_or_reject(context, counted, args, kwargs, modify, by_attribute)

    return apply


# -- what the compiler inserts (see chat_sandbox): names that a template cannot write --------------


def _tick(context: ChatContext, characters: int) -> bool:
    """One more turn of a loop or a macro, which may put so much fixed text into a buffer."""
    context.budget.work(4)
    if characters:
        context.budget.allocate(characters)
    return True


def _new(context: ChatContext, value: Any) -> Any:
    """A list, tuple or dict that an expression has just made."""
    context.budget.allocate_items(len(value))
    return value


def _key(context: ChatContext, value: Any) -> Any:
    """A key in a dict that is being made: hashing a nested tuple can take for ever."""
    if not is_scalar(value):
        raise ChatTemplateError("the keys of a dict must be text or numbers")
    return value


def _slice(context: ChatContext, value: Any, start: Any, stop: Any, step: Any) -> Any:
    if isinstance(value, str):
        context.budget.allocate(len(value))
    elif isinstance(value, (list, tuple)):
        context.budget.allocate_items(len(value))
    return value[slice(start, stop, step)]


def compared(context: ChatContext, value: Any) -> Any:
    """An operand of a comparison."""
    if not is_scalar(value) or isinstance(value, str):
        context.budget.measure(value)
    return value


# Filters of Jinja's that take no time and make no data, however much they are given.
_FREE = ("attr", "count", "d", "default", "first", "last", "length")
_METERED: dict[str, Callable[..., Any]] = {
    **{name: _by_method(name) for name in ("capitalize", "lower", "upper")},
    **{n: _ordering(n) for n in ("dictsort", "groupby", "max", "min", "sort", "unique")},
    "abs": _abs,
    "batch": _batch,
    "center": _by_method("center", width=80),
    "e": _escape,
    "escape": _escape,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "items": _items,
    "join": _join,
    "list": _list,
    "map": _mapping,
    "reject": _selecting(keep=False, by_attribute=False),
    "rejectattr": _selecting(keep=False, by_attribute=True),
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": lambda context, value: value,
    "select": _selecting(keep=True, by_attribute=False),
    "selectattr": _selecting(keep=True, by_attribute=True),
    "slice": _slice_filter,
    "string": lambda context, value: context.budget.text(value),
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
    "trim": _by_method("strip", chars=None),
    "truncate": _truncate,
    "wordcount": _wordcount,
    "~compared": compared,
    "~concat": _concat,
    "~key": _key,
    "~new": _new,
    "~slice": _slice,
    "~tick": _tick,
}
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in _FREE},
    **{name: pass_context(function) for name, function in _METERED.items()},
}
