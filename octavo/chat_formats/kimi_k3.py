"""Kimi K3's format: channels for thought, response and tools, in tags of control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either, more_calls
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.json_schemas import JSON_TYPES, Argument
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_arguments import TaggedArguments, read_name, tagged_arguments
from octavo.chat_formats.tagged_values import tagged_options
from octavo.chat_formats.text_stream import Reading, Tags, TextStream
from octavo.chat_formats.thoughts import ThoughtTags
from octavo.chat_formats.tools import Tool

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_CALL, _ARGUMENT = f'{_OPEN}call tool="', f'{_OPEN}argument key="'
_NAMES = re.compile(r'[^<>"&\n]+')
_STRING = {"type": "string"}
_NO_STRING = {"type": sorted(JSON_TYPES - {"string"})}


def _begin(channel: str) -> str:
    return f"{_OPEN}{channel}{_SEP}"


def _end(channel: str) -> str:
    return f"{_CLOSE}{channel}{_SEP}"


class KimiK3(ChatFormat):
    """``<|open|>call tool="NAME" index="1"<|sep|>``, arguments and ``<|close|>call<|sep|>``, in the
    channel ``tools``, which comes last. Content is in the channel ``response``.

    An argument says its name and its type: strings are as they are, and all others JSON.
    """

    name = "kimi-k3"
    openers = (_begin("tools"),)
    closers = (*map(_end, ("tools", "call", "argument")), _CALL, _ARGUMENT)
    marks = (_begin("response"), _end("response"), _end("message"))
    repeats = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_OPEN, _CLOSE, _SEP)

    def thought_tags(self) -> ThoughtTags:
        return ThoughtTags(_begin("think"), _end("think"))

    @property
    def before_content(self) -> str:
        return _begin("response")

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from stream.expect(_CALL)
        while True:
            yield from self._read_one(stream, message, tools)
            yield from stream.skip_space()
            if not (yield from stream.starts_with(_CALL)):
                break
            message.end_call()
        yield from self.read_end(stream, _end("tools"))
        message.end_call()

    def _read_one(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        name = yield from read_name(stream, '"')
        yield from read_name(stream, _SEP)  # its index
        begin_call(message, name, tools)
        arguments = TaggedArguments(message, tools.get(name))
        ends = Tags((_end("argument"),))
        while True:
            yield from stream.skip_space()
            if (yield from stream.starts_with(_end("call"))):
                break
            yield from stream.expect(_ARGUMENT)
            key = yield from read_name(stream, '"')
            yield from stream.skip_space()
            yield from stream.expect('type="')
            kind = yield from read_name(stream, '"')
            yield from stream.expect(_SEP)
            schema = _STRING if kind == "string" else _NO_STRING
            yield from arguments.read(stream, key, ends, schema)
        arguments.end()

    # -- the grammar ------------------------------------------------------------------------------

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        index = grammar.pattern('[0-9]{1,3}"')

        def call(tool: Tool) -> str:
            begin = grammar.text(f'{_CALL}{tool.name}" index="')
            head = f"{begin} {index} {grammar.text(_SEP)}"
            arguments = tagged_arguments(grammar, tool, _NAMES, partial(_argument, grammar))
            return f"{head} {arguments} {grammar.text(_end('call'))}"

        calls = grammar.rule(either(map(call, tools)))
        again = more_calls(calls, are_allowed=parallel)
        return f"{calls} {again} {grammar.text(_end('tools'))}"

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        # A response comes before calls, and may be empty; the prompt may have begun it.
        begin, end = grammar.text(_begin("response")), grammar.text(_end("response"))
        calls = super()._calls(grammar, tools, parallel)
        return f"(({begin})? {end})? {calls} ({grammar.text(_end('message'))})?"

    def _content(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool, known: Sequence[Tool]
    ) -> str:
        free = grammar.free(
            frozenset((*self.openers, *self.closers, *self.marks, *(self.thoughts or ())))
        )
        response = f"({grammar.text(_begin('response'))})? {free}"
        end = f"({grammar.text(_end('message'))})?"
        if not tools:
            closed = f"{grammar.text(_end('response'))} {end}"
            return f"{self._own_thought(grammar)} {response} ({closed})?"
        calls = self._calls(grammar, tools, parallel)
        closed = f"{grammar.text(_end('response'))} {either((end, calls))}"
        return f"{self._own_thought(grammar)} ({response} ({closed})? | {calls})"


def _argument(grammar: Grammar, argument: Argument, where: str) -> str:
    """Return the grammar of an argument."""
    end = _end("argument")
    texts, others = tagged_options(grammar, argument.schema, end, where, are_told_apart=True)
    head = grammar.text(f'{_ARGUMENT}{argument.name}" type="')
    close = grammar.text(f'"{_SEP}')

    def typed(kind: str, options: Sequence[str]) -> str:
        return f"{head} {kind} {close} {grammar.rule(either(options))}"

    kinds = (('"string"', texts), (grammar.pattern("number|boolean|null|object|array"), others))
    return grammar.rule(either(typed(kind, options) for kind, options in kinds if options))
