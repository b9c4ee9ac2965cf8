"""Harmony, the format of gpt-oss: messages with headers, on channels for thoughts and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Put, Reading, Tags, TextStream
from octavo.chat_formats.thoughts import ThoughtTags
from octavo.chat_formats.tools import Tool

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_TAGS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_COMMENTARY = f"{_CHANNEL}commentary"
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_NEXT = f"{_END}{_START}assistant"  # one message ends, and another begins
_ENDS = frozenset((_START, _CHANNEL, _END, _CALL, _RETURN))  # of a message's text
_TO = "to="
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of thoughts in messages
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS_CHANNEL = re.compile(r"<\|channel\|>\s*analysis\b")
_HEADER = re.compile(r"[A-Za-z0-9_.:/=<>| -]{0,256}")


class _Header(NamedTuple):
    """Header of a message, as far as it says what the message is.

    Args:
        recipient: the tool that it calls; empty if it calls none.
    """

    is_thought: bool = False
    recipient: str = ""


class Harmony(ChatFormat):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``.

    Thoughts are on the channel ``analysis``, and content on ``final``, or on ``commentary`` where
    it is for the user, before calls. The recipient may come before the channel as well. A message
    ends with ``<|end|>``; ``<|call|>`` and ``<|return|>`` end the turn, so there is one call in it.
    """

    name = "harmony"
    openers = (_START, _CHANNEL)
    calls_follow_content = False
    closers = (_CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_CHANNEL, _MESSAGE)

    @property
    def before_content(self) -> str:
        return _FINAL

    def thought_tags(self) -> ThoughtTags:
        return ThoughtTags(_ANALYSIS, _NEXT)

    @property
    def _ends_of_thoughts(self) -> frozenset[str]:
        return frozenset((_COMMENTARY,))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
        # The template takes one call from a message, and either its thought or its content.
        written, given = super().prompt(messages, tools)
        apart: list[Mapping[str, Any]] = []
        while written:
            message = written.pop(0)
            calls = message.get("tool_calls")
            if not calls:
                apart.append(message)
                continue
            results = []
            while written and written[0].get("role") == "tool":
                results.append(written.pop(0))
            begin = _with_content_in_thought(message)
            for call in calls:
                apart.append({**begin, "tool_calls": [call]})
                begin = {"role": message.get("role")}
                mine = [each for each in results if each.get("tool_call_id") == call.get("id")]
                apart += mine
                results = [each for each in results if each not in mine]
            apart += results
        return apart, given

    # -- the parser -------------------------------------------------------------------------------

    def _read(
        self,
        stream: TextStream,
        message: MessageWriter,
        tools: Mapping[str, Tool],
        begins_in_thought: bool,
        content_is_json: bool,
    ) -> Reading[None]:
        if begins_in_thought:
            header: _Header | None = _Header(is_thought=True)
        else:
            header = yield from self._read_beginning(stream, message)
        while True:
            if header is not None and header.is_thought:
                message.begin_thought()
                tag = yield from self._read_text(stream, message.reasoning)
                message.end_thought()
            elif header is not None and header.recipient and tools:
                tag = yield from self._read_call(stream, message, tools, header.recipient)
            else:
                if header is not None and not message.is_empty:
                    message.content("\n\n")
                tag = yield from self._read_content(stream, message, content_is_json)
            if not tag:
                return
            header = None
            if tag in self.openers:
                header = yield from self._read_header(stream, message, tag)

    def _read_beginning(
        self, stream: TextStream, message: MessageWriter
    ) -> Reading[_Header | None]:
        """Read the rest of a header that the prompt has begun: a recipient, and what follows."""
        yield from stream.skip_space(message.content)
        if (yield from stream.starts_with(_TO)):
            return (yield from self._read_header(stream, message, _TO))
        return None

    def _read_header(
        self, stream: TextStream, message: MessageWriter, begin: str
    ) -> Reading[_Header | None]:
        """Read a header behind its beginning; text that is none is content.

        Returns:
            None if no message follows.
        """
        parts = [begin]
        while True:
            tag = yield from stream.up_to(self._tags, parts.append)
            if tag == _MESSAGE:
                text = "".join(parts)
                recipient = _RECIPIENT.search(text)
                is_thought = _ANALYSIS_CHANNEL.search(text) is not None and recipient is None
                return _Header(is_thought, recipient[1] if recipient is not None else "")
            if tag in (_CHANNEL, _CONSTRAIN):
                parts.append(tag)
                continue
            text = "".join(part for part in parts if part not in _TAGS)
            if begin == _TO or not _HEADER.fullmatch(text):
                message.content(text)
            if tag != _START:
                return None
            parts = [begin := tag]

    def _read_content(
        self, stream: TextStream, message: MessageWriter, content_is_json: bool
    ) -> Reading[str]:
        if content_is_json and (yield from stream.skip_space(message.content)):
            is_at_tag = yield from stream.is_at(self._tags)
            if not is_at_tag:
                yield from self._read_json(stream, message)
                return ""
        return (yield from self._read_text(stream, message.content))

    def _read_text(self, stream: TextStream, put: Put) -> Reading[str]:
        """Read the text of a message, and return the tag that ends it."""
        while (tag := (yield from stream.up_to(self._tags, put))) and tag not in _ENDS:
            pass
        return tag

    def _read_call(
        self,
        stream: TextStream,
        message: MessageWriter,
        tools: Mapping[str, Tool],
        name: str,
    ) -> Reading[str]:
        """Read a call, and return the tag that ends it, or the content that it is."""
        call = self._read_arguments(stream, message, tools, name)
        plain_until = yield from self._try(call, stream, message, had_tag=True)
        while True:
            tag = yield from self._read_text(stream, message.content)
            if not tag or stream.position - len(tag) >= plain_until:
                return tag

    def _read_arguments(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool], name: str
    ) -> Reading[None]:
        begin_call(message, name, tools)
        yield from stream.skip_space()
        yield from stream.json_value(message.arguments)
        yield from self.read_end(stream, _CALL)
        message.end_call()

    @cached_property
    def _tags(self) -> Tags:
        return Tags((*_TAGS, *self.template.special_tokens))

    # -- the grammar ------------------------------------------------------------------------------

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        def call(tool: Tool) -> str:
            to = f"{_TO}functions.{tool.name}"
            heads = (
                f"{_COMMENTARY} {to} {_CONSTRAIN}json{_MESSAGE}",
                f"{_COMMENTARY} {to}{_CONSTRAIN}json{_MESSAGE}",
                f" {to}{_COMMENTARY} json{_MESSAGE}",
            )
            return f"{either(map(grammar.text, heads))} {grammar.json(tool.parameters)}"

        return grammar.rule(either(map(call, tools)))

    def _thoughts_before(self, grammar: Grammar, *, begins_in_thought: bool) -> str:
        more = self._own_thought(grammar)
        return f"{self._rest_of_thought(grammar)} {more}" if begins_in_thought else more

    def _own_thought(self, grammar: Grammar) -> str:
        return f"({grammar.text(_ANALYSIS)} {self._rest_of_thought(grammar)})*"

    def _rest_of_thought(self, grammar: Grammar) -> str:
        return f"{grammar.up_to(_END, frozenset(_TAGS))} {grammar.text(_NEXT[len(_END) :])}"

    def _content(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool, known: Sequence[Tool]
    ) -> str:
        preamble = f"{grammar.text(_COMMENTARY + _MESSAGE)} {self._rest_of_thought(grammar)}"
        options = [f"{grammar.text(_FINAL)} {grammar.free(frozenset(_TAGS))}"]
        if tools:
            options.append(self._calls(grammar, tools, parallel))
        thoughts = self._own_thought(grammar)
        return f"({thoughts} {preamble})* {thoughts} {either(options)}"


def _with_content_in_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    key = next((key for key in _THOUGHTS if message.get(key)), None)
    if key is None or not content or not isinstance(content, str):
        return message
    return {**message, key: f"{message[key]}\n\n{content}", "content": ""}
