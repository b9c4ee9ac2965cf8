"""Arguments that come one by one, each a name and a value between tags: reader and grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.chat_formats.grammar import Grammar
from octavo.chat_formats.json_schemas import DEFINITIONS, Argument, arguments_of
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_values import json_inside, read_tagged_value
from octavo.chat_formats.text_stream import MalformedCall, Reading, Tags, TextStream
from octavo.chat_formats.tools import Tool


class TaggedArguments:
    """The arguments of one call, which go to the message as their values are read.

    Args:
        tool: the one that is called; None if it is not known, and nor are the types of values.
    """

    def __init__(self, message: MessageWriter, tool: Tool | None):
        schema = tool.parameters if tool is not None else {}
        self._properties: Mapping[str, Any] = schema.get("properties") or {}
        self._definitions = {key: schema[key] for key in DEFINITIONS & schema.keys()}
        self._message = message
        self._names: set[str] = set()
        message.arguments("{")

    def read(
        self,
        stream: TextStream,
        name: str,
        ends: Tags,
        schema: Mapping[str, Any] | None = None,
    ) -> Reading[None]:
        """Read a value up to and with its end tag.

        Args:
            schema: of the value, where the text itself says something of it.

        Raises:
            MalformedCall: the argument was there already, or see `read_tagged_value`.
        """
        if name in self._names:
            raise MalformedCall(f"it has the argument {name!r:.80} twice")
        separator = ", " if self._names else ""
        self._message.arguments(f'{separator}"{json_inside(name)}": ')
        self._names.add(name)
        if schema is None:
            known = self._properties.get(name)
            schema = {**self._definitions, **known} if isinstance(known, Mapping) else {}
        yield from read_tagged_value(stream, ends, schema, self._message.arguments)

    def end(self) -> None:
        """End the arguments."""
        self._message.arguments("}")


def tagged_arguments(
    grammar: Grammar,
    tool: Tool,
    names: re.Pattern[str],
    written: Callable[[Argument, str], str],
) -> str:
    """Return the grammar of the arguments of a tool, in the order of its schema.

    Args:
        names: the names that the format can write.
        written: makes the grammar of an argument, of itself and of where it is, for errors.
    """
    parts = []
    for argument in arguments_of(tool, names, is_lenient=grammar.is_lenient):
        text = written(argument, f"the argument {argument.name!r} of {tool.name!r}")
        parts.append(text if argument.is_required else f"({text})?")
    return " ".join(parts)


def read_name(stream: TextStream, end: str) -> Reading[str]:
    """Read a name up to and with the text that ends it.

    Raises:
        MalformedCall: the text ends before.
    """
    parts: list[str] = []
    if not (yield from stream.up_to(Tags((end,)), parts.append)):
        raise MalformedCall("the text ends within a name")
    return "".join(parts)
