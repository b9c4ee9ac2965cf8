"""Calls as ``<invoke name="…">`` tags in a block: MiniMax M2's, and DeepSeek's from V3.2 on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either, more_calls
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.json_schemas import JSON_TYPES, Argument
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_arguments import TaggedArguments, read_name, tagged_arguments
from octavo.chat_formats.tagged_values import tagged_options, tagged_value
from octavo.chat_formats.text_stream import Reading, Tags, TextStream
from octavo.chat_formats.tools import Tool

_NAMES = re.compile(r'[^<>"\n]+')
_DSML = "｜DSML｜"
_CALLS, _FUNCTION_CALLS = f"<{_DSML}tool_calls>", f"<{_DSML}function_calls>"
_STRING = {"type": "string"}
_NO_STRING = {"type": sorted(JSON_TYPES - {"string"})}


def _closing(tag: str) -> str:
    return f"</{tag[1:]}"


class InvokeCalls(ChatFormat):
    """``<invoke name="NAME">``, ``<parameter name="KEY">VALUE</parameter>``…, ``</invoke>``, in a
    block of its own tags. A value is all that is between its tags.

    A format gives ``openers`` and ``closers`` of blocks, of which the first is usual, and
    ``prefix``, with which names of tags begin.
    """

    repeats = False
    prefix: ClassVar[str] = ""

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        invoke = f'<{self.prefix}invoke name="'
        yield from stream.skip_space()
        yield from stream.expect(invoke)
        while True:
            yield from self._read_invoke(stream, message, tools)
            yield from stream.skip_space()
            if not (yield from stream.starts_with(invoke)):
                break
            message.end_call()
        yield from self.read_end(stream, _closing(opener))
        message.end_call()

    def _read_invoke(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        name = yield from read_name(stream, '"')
        yield from stream.expect(">")
        begin_call(message, name, tools)
        arguments = TaggedArguments(message, tools.get(name))
        ends = Tags((f"</{self.prefix}parameter>",))
        while True:
            yield from stream.skip_space()
            if (yield from stream.starts_with(f"</{self.prefix}invoke>")):
                break
            yield from stream.expect(f'<{self.prefix}parameter name="')
            key = yield from read_name(stream, '"')
            schema: Mapping[str, Any] | None = None
            yield from stream.skip_space()
            if (yield from stream.starts_with('string="')):
                is_string = yield from read_name(stream, '"')
                schema = _STRING if is_string == "true" else _NO_STRING
            yield from stream.expect(">")
            yield from arguments.read(stream, key, ends, schema)
        arguments.end()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        def call(tool: Tool) -> str:
            begin = grammar.text(f'<{self.prefix}invoke name="{tool.name}">\n')
            arguments = tagged_arguments(grammar, tool, _NAMES, partial(self._argument, grammar))
            return f"{begin} {arguments} {grammar.text(f'</{self.prefix}invoke>' + chr(10))}"

        calls = grammar.rule(either(map(call, tools)))
        again = more_calls(calls, are_allowed=parallel)
        return f"{grammar.text(chr(10))} {calls} {again} {grammar.text(self.closers[0])}"

    def _argument(self, grammar: Grammar, argument: Argument, where: str) -> str:
        begin = grammar.text(f'<{self.prefix}parameter name="{argument.name}">')
        return f"{begin} {tagged_value(grammar, argument.schema, self._value_end, where)}"

    @property
    def _value_end(self) -> str:
        return f"</{self.prefix}parameter>\n"


class MiniMaxM2(InvokeCalls):
    """Calls in ``<minimax:tool_call>``."""

    name = "minimax-m2"
    openers = ("<minimax:tool_call>",)
    closers = ("</minimax:tool_call>", "</invoke>", "</parameter>")

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(*cls.openers)


class DeepSeekV4(InvokeCalls):
    """Calls in ``<｜DSML｜tool_calls>``. Parameters say whether they are strings.

    They have ``string="true"``, or ``false`` for JSON.
    """

    name = "deepseek-v4"
    prefix = _DSML
    openers = (_CALLS, _FUNCTION_CALLS)
    closers = (*map(_closing, openers), f"</{_DSML}invoke>", f"</{_DSML}parameter>")

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_DSML)

    def _argument(self, grammar: Grammar, argument: Argument, where: str) -> str:
        texts, others = tagged_options(
            grammar, argument.schema, self._value_end, where, are_told_apart=True
        )

        def begun(is_string: str, options: Sequence[str]) -> str:
            begin = f'<{self.prefix}parameter name="{argument.name}" string="{is_string}">'
            return f"{grammar.text(begin)} {grammar.rule(either(options))}"

        kinds = (("true", texts), ("false", others))
        return grammar.rule(either(begun(*kind) for kind in kinds if kind[1]))


class DeepSeekV32(DeepSeekV4):
    """The same in ``<｜DSML｜function_calls>``."""

    name = "deepseek-v3.2"
    openers = (_FUNCTION_CALLS, _CALLS)
    closers = (_closing(_FUNCTION_CALLS), *DeepSeekV4.closers)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_DSML, "function_calls>")
