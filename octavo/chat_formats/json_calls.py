"""Calls that are JSON objects with a name and arguments: how they are read, and their grammar."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.chat_formats.grammar import Grammar, either, literal, more_calls
from octavo.chat_formats.json_schemas import DEFINITIONS
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import MalformedCall, Put, Reading, TextStream, load_json
from octavo.chat_formats.tools import Tool

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")
_SPACE = r"[ \n\t]*"


def read_json_calls(
    stream: TextStream,
    message: MessageWriter,
    tools: Mapping[str, Tool],
    *,
    is_known: bool = False,
    name_key: str = "name",
) -> Reading[None]:
    """Read a call ``{"name": …, "arguments": {…}}``, or a list of such. The last call has not ended
    then, as what ends it may be missing.

    Args:
        name_key: of the tool's name.
        is_known: whether the name must be that of a tool, and no keys are strange, because nothing
            else tells a call from other JSON. Else another name is a call too, with a warning.

    Raises:
        MalformedCall: it is not that.
    """

    def read_call() -> Reading[None]:
        return _read_json_call(stream, message, tools, is_known, name_key)

    if (yield from stream.peek()) == "[":
        yield from read_list(stream, message, read_call)
    else:
        yield from read_call()


def read_list(
    stream: TextStream, message: MessageWriter, read_call: Callable[[], Reading[None]]
) -> Reading[None]:
    """Read a list of calls in brackets. The last has not ended then, as what ends it may be
    missing.

    Raises:
        MalformedCall: it is none, or ``read_call`` raises it.
    """
    yield from stream.expect("[")
    while True:
        yield from stream.skip_space()
        yield from read_call()
        if (yield from stream.skip_space()) == "]":
            break
        yield from stream.expect(",")
        message.end_call()
    yield from stream.take()


def _read_json_call(
    stream: TextStream,
    message: MessageWriter,
    tools: Mapping[str, Tool],
    is_known: bool,
    name_key: str,
) -> Reading[None]:
    """Read one object. Keys come in any order; others than those of a call mean nothing here."""
    yield from stream.expect("{")
    has_name = has_arguments = False
    early: list[str] = []  # arguments before the name
    while (yield from stream.skip_space()) != "}":
        key = yield from stream.json_string()
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key == name_key:
            if has_name:
                raise MalformedCall("it has two names")
            name = yield from stream.json_string()
            begin_call(message, name, tools, is_known=is_known)
            has_name = True
            for part in early:
                message.arguments(part)
        elif key in _ARGUMENTS:
            if has_arguments:
                raise MalformedCall("it has arguments twice")
            has_arguments = True
            yield from _read_arguments(stream, message.arguments if has_name else early.append)
        elif is_known and key not in _IGNORED:
            raise MalformedCall(f"{key!r:.80} is no part of it")
        else:
            yield from stream.json_value(lambda text: None)
        if (yield from stream.skip_space()) != "}":
            yield from stream.expect(",")
    yield from stream.take()
    if not has_name or (is_known and not has_arguments):
        raise MalformedCall("it has no name" if not has_name else "it has no arguments")
    if not has_arguments:
        message.arguments("{}")


def _read_arguments(stream: TextStream, put: Put) -> Reading[None]:
    first = yield from stream.peek()
    if first == "{":
        yield from stream.json_value(put)
    elif first == '"':  # the text of an object, as in messages of OpenAI's
        text = yield from stream.json_string()
        if not isinstance(load_json(text), dict):
            raise MalformedCall("its arguments are no object", "arguments")
        put(text)
    else:
        yield from stream.expect("null")
        put("{}")


def begin_call(
    message: MessageWriter,
    name: str,
    tools: Mapping[str, Tool],
    call_id: str = "",
    *,
    is_known: bool = False,
) -> None:
    """Begin a call of a name that was read.

    Raises:
        MalformedCall: it is empty, or no tool has it and ``is_known``.
    """
    if name not in tools:
        if is_known or not name:
            raise MalformedCall(f"no tool has the name {name!r:.80}", "unknown_tool")
        message.warn(f"no tool has the name {name!r:.80}")
    message.begin_call(name, call_id)


def json_calls(
    grammar: Grammar, tools: Sequence[Tool], parallel: bool, key: str = "arguments"
) -> str:
    """Return the grammar of calls between the brackets of a list; of just one, if not
    ``parallel``."""
    call = json_call(grammar, tools, key)
    again = f'", " {call}'
    return f"{call} {more_calls(again, are_allowed=parallel)}"


def json_call(grammar: Grammar, tools: Sequence[Tool], key: str = "arguments") -> str:
    """Return the grammar of a call ``{"name": …, "arguments": {…}}`` of one of the tools."""

    def call(tool: Tool) -> str:
        head = literal(f'{{"name": "{tool.name}", "{key}": ')
        return f'{head} {grammar.json(tool.parameters)} "}}"'

    return grammar.rule(either(map(call, tools)))


def loose_json_call(
    grammar: Grammar,
    tools: Sequence[Tool],
    key: str = "arguments",
    before: str = "",
    after: str = "",
) -> str:
    """Return the grammar of a call with any white space, where content could be instead.

    Args:
        before, after: regular expressions of what stands around it.
    """

    def call(tool: Tool) -> str:
        head = grammar.pattern(_loose_beginning(before, re.escape(tool.name)))
        between = grammar.pattern(f'{_SPACE},{_SPACE}"{key}"{_SPACE}:{_SPACE}')
        end = grammar.pattern(rf"{_SPACE}\}}{after}")
        return f"{head} {between} {grammar.json(tool.parameters, is_loose=True)} {end}"

    return grammar.rule(either(map(call, tools)))


def call_schema(tool: Tool, key: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of a call. References within it point to its own outermost part."""
    parameters = dict(tool.parameters)
    definitions = {name: parameters.pop(name) for name in DEFINITIONS & parameters.keys()}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
        **definitions,
    }


def like_a_loose_call(tools: Sequence[Tool], before: str = "") -> str:
    """Return a regular expression of texts that begin like such a call."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    return f"{_loose_beginning(before, f'({names})')}(?s:.*)"


def _loose_beginning(before: str, name: str) -> str:
    return rf'{_SPACE}{before}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{name}"'


def earlier_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of a call in an earlier message, which is as OpenAI's are."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else the model sees the text that it wrote
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}
