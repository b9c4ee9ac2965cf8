"""Gemma's formats: ``call:NAME{key:value,…}`` between tags, with quotes that no text contains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.json_schemas import (
    DEFINITIONS,
    arguments_of,
    resolved,
    types_of,
)
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_values import json_inside, tagged_options
from octavo.chat_formats.text_stream import MalformedCall, Put, Reading, Tags, TextStream, load_json
from octavo.chat_formats.tools import Tool

_MAX_DEPTH = 16
_FREE_DEPTH = 3  # of values whose schema says nothing
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_KEY = re.compile(r"[A-Za-z0-9_.$/-]+")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}:"
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_COMBINING = ("allOf", "not", "if", "$ref", "$dynamicRef")
_UNSUPPORTED = {
    "array": ("prefixItems", "contains", "uniqueItems", "unevaluatedItems", *_COMBINING),
    "object": ("patternProperties", "dependentSchemas", "dependentRequired", "propertyNames",
               "minProperties", "maxProperties", "unevaluatedProperties", *_COMBINING),
}  # fmt: skip


class FunctionGemma(ChatFormat):
    """``<start_function_call>call:NAME{key:<escape>text<escape>,n:3}<end_function_call>``.

    Strings are between two of ``quote``, and keys as they are.
    """

    name = "functiongemma"
    openers = ("<start_function_call>",)
    closers = ("<end_function_call>",)
    quote: ClassVar[str] = "<escape>"

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(*cls.openers)

    # -- the parser -------------------------------------------------------------------------------

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from stream.expect("call:")
        name = yield from stream.matching(_NAME)
        begin_call(message, name, tools)
        yield from stream.skip_space()
        yield from self._read_object(stream, message.arguments, 0)
        yield from self.read_end(stream, self.closers[0])
        message.end_call()

    def _read_value(self, stream: TextStream, put: Put, depth: int) -> Reading[None]:
        if depth > _MAX_DEPTH:
            raise MalformedCall(f"it is nested more than {_MAX_DEPTH} deep", "too_large")
        first = yield from stream.skip_space()
        if first == "{":
            yield from self._read_object(stream, put, depth)
        elif first == "[":
            yield from self._read_list(stream, put, depth)
        elif first == '"':
            yield from stream.json_value(put)
        elif (yield from stream.starts_with(self.quote)):
            yield from self._read_string(stream, put)
        else:
            word = yield from stream.matching(_WORD)
            word = _WORDS.get(word, word)
            load_json(word)
            put(word)

    def _read_string(self, stream: TextStream, put: Put) -> Reading[None]:
        put('"')
        ends = Tags((self.quote,))
        if not (yield from stream.up_to(ends, lambda text: put(json_inside(text)))):
            raise MalformedCall("a string is not closed")
        put('"')

    def _read_object(self, stream: TextStream, put: Put, depth: int) -> Reading[None]:
        yield from stream.expect("{")
        begin = "{"
        while (first := (yield from stream.skip_space())) != "}":
            put(begin)
            if first == '"':
                yield from stream.json_value(put)
            elif (yield from stream.starts_with(self.quote)):
                yield from self._read_string(stream, put)
            else:
                key = yield from stream.matching(_KEY)
                if not key:
                    raise MalformedCall("an argument has no name")
                put(f'"{json_inside(key)}"')
            yield from stream.skip_space()
            yield from stream.expect(":")
            put(": ")
            yield from self._read_value(stream, put, depth + 1)
            if (yield from stream.skip_space()) != "}":
                yield from stream.expect(",")
            begin = ", "
        yield from stream.take()
        put("{}" if begin == "{" else "}")

    def _read_list(self, stream: TextStream, put: Put, depth: int) -> Reading[None]:
        yield from stream.expect("[")
        put("[")
        separator = ""
        while (yield from stream.skip_space()) != "]":
            put(separator)
            yield from self._read_value(stream, put, depth + 1)
            if (yield from stream.skip_space()) != "]":
                yield from stream.expect(",")
            separator = ", "
        yield from stream.take()
        put("]")

    # -- the grammar ------------------------------------------------------------------------------

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        def call(tool: Tool) -> str:
            arguments = self._object(grammar, tool.parameters, 0, repr(tool.name))
            return (
                f"{grammar.text(f'call:{tool.name}')} {arguments} {grammar.text(self.closers[0])}"
            )

        return grammar.rule(either(map(call, tools)))

    def _value(self, grammar: Grammar, schema: Mapping[str, Any], depth: int, where: str) -> str:
        """Return the grammar of a value.

        Args:
            schema: with the definitions that it refers to.
            where: the tool and its argument, for errors.
        """
        schema = resolved(schema, schema)
        rest = dict(schema)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := rest.pop(keyword, None), list):
                branches = [{**rest, **option} for option in options]
                return grammar.rule(
                    either(self._value(grammar, each, depth, where) for each in branches)
                )
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return grammar.rule(either(grammar.text(self._written(each, where)) for each in values))
        if not schema.keys() - DEFINITIONS:
            return self._anything(grammar)
        types = sorted(types_of(schema))
        return grammar.rule(
            either(self._typed(grammar, kind, schema, depth, where) for kind in types)
        )

    def _typed(
        self, grammar: Grammar, kind: str, schema: Mapping[str, Any], depth: int, where: str
    ) -> str:
        """Return the grammar of a value of one type."""
        if kind == "string":
            (text,), _ = tagged_options(
                grammar, {**schema, "type": kind}, self.quote, where, are_told_apart=True
            )
            return f"{grammar.text(self.quote)} {text}"
        if kind == "number":
            named = schema.get("type", kind)
            return grammar.json({**schema, "type": kind if kind in named else "integer"})
        if kind not in _UNSUPPORTED:
            return grammar.json({"type": kind})
        unsupported = [repr(key) for key in _UNSUPPORTED[kind] if schema.get(key)]
        if depth > _MAX_DEPTH:
            unsupported.append(f"nesting of more than {_MAX_DEPTH} levels")
        if unsupported and grammar.is_lenient:
            return self._anything(grammar)
        if unsupported:
            raise InvalidRequestError(
                f"{where}: {unsupported[0]} cannot be enforced in the format in which this model "
                "writes calls",
                "tools",
            )
        if kind == "object":
            return self._object(grammar, schema, depth, where)
        items = schema.get("items")
        items = {**_definitions(schema), **items} if isinstance(items, Mapping) else {}
        value = self._value(grammar, items, depth + 1, where)
        return _list(value, schema.get("minItems", 0), schema.get("maxItems"))

    def _object(self, grammar: Grammar, schema: Mapping[str, Any], depth: int, where: str) -> str:
        """Return the grammar of an object: its keys in order, as templates sort them."""
        if "properties" not in schema and not schema.get("required"):
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            others = {**_definitions(schema), **others} if isinstance(others, Mapping) else {}
            return _map(grammar, self._value(grammar, others, depth + 1, where))
        arguments = arguments_of(
            Tool(where, parameters=schema), _KEY, is_lenient=grammar.is_lenient
        )
        # What may follow a member, and what may be there without one before it.
        following = beginning = ""
        for argument in sorted(arguments, key=lambda each: each.name.lower(), reverse=True):
            value = self._value(
                grammar, argument.schema, depth + 1, f"{argument.name!r} of {where}"
            )
            member = f"{grammar.text(argument.name + ':')} {value}"
            if argument.is_required:
                beginning = grammar.rule(f"{member} {following}")
                following = grammar.rule(f'"," {member} {following}')
            else:
                first = grammar.rule(f"{member} {following}")
                beginning = f"({first} | {beginning})" if beginning else f"{first}?"
                following = grammar.rule(f'("," {member})? {following}')
        return f'"{{" {beginning} "}}"'

    def _anything(self, grammar: Grammar) -> str:
        """Return the grammar of a value whose schema says nothing."""
        quote = grammar.text(self.quote)
        (text,), _ = tagged_options(grammar, {"type": "string"}, self.quote, "")
        number = grammar.json({"type": "number"})
        value = grammar.rule(f'{quote} {text} | {number} | "true" | "false" | "null"')
        for _ in range(_FREE_DEPTH):
            value = grammar.rule(either((value, _list(value, 0, None), _map(grammar, value))))
        return value

    def _written(self, value: Any, where: str) -> str:
        """Return a value as the model writes it."""
        if isinstance(value, str):
            if self.quote in value:
                raise InvalidRequestError(f"{where}: {self.quote!r} cannot be in a text", "tools")
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            members = (f"{key}:{self._written(each, where)}" for key, each in value.items())
            return f"{{{','.join(members)}}}"
        if isinstance(value, list | tuple):
            return f"[{','.join(self._written(each, where) for each in value)}]"
        return json.dumps(value)


class Gemma4(FunctionGemma):
    """The same in ``<|tool_call>`` and ``<tool_call|>``, with ``<|"|>`` for a quote."""

    name = "gemma-4"
    openers = ("<|tool_call>",)
    closers = ("<tool_call|>",)
    quote = '<|"|>'


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in DEFINITIONS & schema.keys()}


def _list(value: str, low: int, high: int | None) -> str:
    """Return the grammar of a list of so many values."""
    if high == 0:
        return '"[]"'
    count = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    values = f'{value} ("," {value}){count if low > 1 or high is not None else "*"}'
    return f'"[" {values} "]"' if low else f'"[" ({values})? "]"'


def _map(grammar: Grammar, value: str) -> str:
    """Return the grammar of an object with any keys."""
    member = grammar.rule(f"{grammar.pattern(_ANY_KEY)} {value}")
    return f'"{{" ({member} ("," {member})*)? "}}"'
