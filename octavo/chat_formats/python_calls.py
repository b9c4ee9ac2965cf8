"""Calls as Python writes them, ``f(x=1, y='a')``: how they are read, and their grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.chat_formats.grammar import Grammar, either, literal, more_calls
from octavo.chat_formats.json_calls import begin_call, read_list
from octavo.chat_formats.json_schemas import arguments_of, types_of
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_values import json_inside
from octavo.chat_formats.text_stream import MalformedCall, Put, Reading, TextStream, load_json
from octavo.chat_formats.tools import Tool
from octavo.text.unicode import clean_text

_MAX_DEPTH = 32
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_STRING_PART = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
            "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_python_call(
    stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool], is_known: bool
) -> Reading[None]:
    """Read one call: see `read_python_calls`."""
    name = yield from stream.matching(_NAME)
    yield from stream.expect("(")
    begin_call(message, name, tools, is_known=is_known)
    names: set[str] = set()
    message.arguments("{")
    while (yield from stream.skip_space()) != ")":
        key = yield from stream.matching(_KEY)
        if not key or key in names:
            raise MalformedCall("an argument has no name" if not key else f"{key!r} is there twice")
        yield from stream.skip_space()
        yield from stream.expect("=")
        yield from stream.skip_space()
        message.arguments(f'{", " if names else ""}"{key}": ')
        names.add(key)
        yield from _read_literal(stream, message.arguments)
        if (yield from stream.skip_space()) != ")":
            yield from stream.expect(",")
    yield from stream.take()
    message.arguments("}")


def _read_literal(stream: TextStream, put: Put, depth: int = 0) -> Reading[None]:
    """Read a literal of Python's or of JSON's, and hand its JSON to ``put`` in pieces."""
    if depth > _MAX_DEPTH:
        raise MalformedCall(f"it is nested more than {_MAX_DEPTH} deep", "too_large")
    first = yield from stream.peek()
    if first and first in "'\"":
        yield from _read_string(stream, put)
    elif first and first in "[(":
        yield from _read_items(stream, put, "]" if first == "[" else ")", depth)
    elif first == "{":
        yield from _read_dict(stream, put, depth)
    else:
        word = yield from stream.matching(_WORD)
        word = _WORDS.get(word, word)
        load_json(word)
        put(word)


def _read_items(stream: TextStream, put: Put, closing: str, depth: int) -> Reading[None]:
    yield from stream.take()
    put("[")
    separator = ""
    while (yield from stream.skip_space()) != closing:
        put(separator)
        separator = ", "
        yield from _read_literal(stream, put, depth + 1)
        if (yield from stream.skip_space()) != closing:
            yield from stream.expect(",")
    yield from stream.take()
    put("]")


def _read_dict(stream: TextStream, put: Put, depth: int) -> Reading[None]:
    yield from stream.take()
    put("{")
    separator = ""
    while (first := (yield from stream.skip_space())) != "}":
        if not first or first not in "'\"":
            raise MalformedCall("a key is no string")
        put(separator)
        separator = ", "
        yield from _read_string(stream, put)
        yield from stream.skip_space()
        yield from stream.expect(":")
        put(": ")
        yield from stream.skip_space()
        yield from _read_literal(stream, put, depth + 1)
        if (yield from stream.skip_space()) != "}":
            yield from stream.expect(",")
    yield from stream.take()
    put("}")


def _read_string(stream: TextStream, put: Put) -> Reading[None]:
    quote = yield from stream.take()
    put('"')
    while True:
        yield from stream.while_matching(_STRING_PART[quote], lambda text: put(json_inside(text)))
        character = yield from stream.peek()
        if character == quote:
            break
        if character != "\\":
            raise MalformedCall("a string is not closed")
        yield from stream.take()
        put((yield from _read_escape(stream)))
    yield from stream.take()
    put('"')


def _read_escape(stream: TextStream) -> Reading[str]:
    """Read what follows a backslash, and return it as it stands in a string of JSON's."""
    kind = yield from stream.peek()
    if not kind:
        raise MalformedCall("a string is not closed")
    if kind not in _DIGITS:
        if kind not in _ESCAPES:
            return json_inside("\\")  # Python keeps the backslash, too
        yield from stream.take()
        return json_inside(_ESCAPES[kind])
    yield from stream.take()
    digits = ""
    while len(digits) < _DIGITS[kind]:
        digit = yield from stream.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise MalformedCall("an escape of a string is wrong")
        digits += yield from stream.take()
    code = int(digits, 16)
    if kind == "U":
        if code > 0x10FFFF:
            raise MalformedCall("an escape of a string is wrong")
        return json_inside(clean_text(chr(code)))
    return f"\\u{code:04x}"


def read_python_calls(
    stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool], *, is_known: bool
) -> Reading[None]:
    """Read a list of calls with named arguments. The last has not ended then, as what ends it may
    be missing.

    Args:
        is_known: see `read_json_calls`.

    Raises:
        MalformedCall: it is no such list, or an argument is no literal.
    """
    yield from read_list(
        stream, message, lambda: read_python_call(stream, message, tools, is_known)
    )


def python_calls(
    grammar: Grammar, tools: Sequence[Tool], parallel: bool, *, is_bare: bool = False
) -> str:
    """Return the grammar of a list of calls; of just one, if not ``parallel``.

    Args:
        is_bare: whether content could be instead.
    """
    calls = [(tool, _arguments(grammar, tool)) for tool in tools]
    begin = grammar.after_gap if is_bare else grammar.text
    first = grammar.rule(either(f"{begin(f'[{tool.name}(')} {rest}" for tool, rest in calls))
    again = grammar.rule(
        either(f"{grammar.text(f', {tool.name}(')} {rest}" for tool, rest in calls)
    )
    return f'{first} {more_calls(again, are_allowed=parallel)} "]"'


def python_call(grammar: Grammar, tools: Sequence[Tool]) -> str:
    """Return the grammar of a call of one of the tools."""
    return grammar.rule(
        either(f"{grammar.text(f'{tool.name}(')} {_arguments(grammar, tool)}" for tool in tools)
    )


def _arguments(grammar: Grammar, tool: Tool) -> str:
    """Return the grammar of the arguments, those first that must be there, and the parenthesis."""
    required: list[str] = []
    optional: list[str] = []
    for argument in arguments_of(tool, _KEY, is_lenient=grammar.is_lenient):
        named = f"{literal(argument.name + '=')} {_value(grammar, argument.schema)}"
        (required if argument.is_required else optional).append(named)
    # Those that may follow the i-th optional one, and those with one of them at the beginning.
    following = beginning = ""
    for named in reversed(optional):
        beginning = grammar.rule(f"{named} {following}" + (f" | {beginning}" if beginning else ""))
        following = grammar.rule(f'(", " {named})? {following}')
    if required:
        return grammar.rule(' ", " '.join(required) + f' {following} ")"')
    return grammar.rule(f'{beginning}? ")"' if beginning else '")"')


def _value(grammar: Grammar, schema: Mapping[str, object]) -> str:
    """Return the grammar of a value: JSON, which is read as well as Python's literals, but for the
    words that models write."""
    if types_of(schema) == {"boolean"} and not {"enum", "const"} & schema.keys():
        return '("True" | "False")'
    return grammar.json(schema)
