"""`ChatFormat`, the way in which a family of models writes thoughts and calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.grammar import Grammar, either, more_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.messages import ParsedMessage
from octavo.chat_formats.output_parser import OutputParser, parse_whole
from octavo.chat_formats.text_stream import MalformedCall, Reading, Tags, TextStream
from octavo.chat_formats.thoughts import ThoughtTags, ends_in_thought, thought_tags
from octavo.chat_formats.tools import Tool, ToolChoice, tools_of
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.thought_texts import ThoughtTexts

# Tags around content of Granite 3 and ERNIE, and of Hunyuan.
_ANSWERS = (("<response>", "</response>"), ("<answer>", "</answer>"))


class Template(NamedTuple):
    """The parts of a model that say which format it writes.

    Args:
        source: of the chat template.
        special_tokens: ids of the vocabulary's control tokens by text.
    """

    source: str
    special_tokens: Mapping[str, int]

    def has(self, *texts: str) -> bool:
        """Tell whether the source has all of these texts."""
        return all(text in self.source for text in texts)


class ChatFormat:
    """A format: how calls begin, how they are read, and the grammar of them.

    A new one is a subclass in a file of its own, and a line in the registry. It gives `name` and
    `fits`, and

    - for calls behind a tag ``openers``, the tags that begin a call or a group of calls, the usual
      one first; `read_call`, which reads what follows one of them; `call`, the grammar of that;
      ``repeats``, whether there may be another opener after it; and ``closers``, further tags;
    - ``marks``, tags around content, which are dropped; and ``calls_follow_content``, whether a
      message that has content may go on with calls;
    - for calls without a tag, with which an answer begins, ``bare_beginnings``, the characters with
      which they begin; `read_bare_call`, `bare_call` and `like_a_bare_call`; and ``uses_opener``,
      which is False if calls that are required are written so.

    Methods that read raise `MalformedCall` where the text is no call: it then is content.

    Attributes:
        template: the template that it was chosen for.
        thoughts: the tags of thoughts; None if the model has none.
    """

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()
    bare_beginnings: ClassVar[str] = ""
    uses_opener: ClassVar[bool] = True
    repeats: ClassVar[bool] = True
    calls_follow_content: ClassVar[bool] = True

    def __init__(self, template: Template):
        self.template = template
        self.thoughts = self.thought_tags()

    @classmethod
    def fits(cls, template: Template) -> bool:
        """Tell whether a template's model writes calls in this format."""
        raise NotImplementedError

    def thought_tags(self) -> ThoughtTags | None:
        """Return the tags of the model's thoughts."""
        return thought_tags(self.template.source, self.template.special_tokens)

    def begins_in_thought(self, prompt: str) -> bool:
        """Tell whether an answer to a rendered prompt begins within a thought."""
        return self.thoughts is not None and ends_in_thought(
            prompt, self.thoughts, self.template.special_tokens
        )

    @property
    def before_content(self) -> str:
        """The header that the model writes before content; empty if it writes none."""
        return ""

    @property
    def marks_of_answers(self) -> tuple[str, ...]:
        """The tags around content that follows a thought. They say nothing, and are dropped."""
        return next((tags for tags in _ANSWERS if self.template.has(*tags)), ())

    @property
    def ends_of_thought(self) -> tuple[str, ...]:
        """The texts that end a thought; none if the model has no thoughts."""
        return (self.thoughts.end, *sorted(self._ends_of_thoughts)) if self.thoughts else ()

    def thought_texts(self, *, begins_inside: bool) -> ThoughtTexts:
        """Return the texts around the thoughts of an answer, for counting and bounding them. What
        closes one is on a line of its own where the template writes it so.

        Args:
            begins_inside: whether the answer begins within a thought.

        Raises:
            InvalidRequestError: the model has none.
        """
        if self.thoughts is None:
            raise InvalidRequestError("this model has no thoughts", "thinking_token_budget")
        begin, end = self.thoughts
        has_own_line = self.template.has("\n" + end) or self.template.has("\\n" + end)
        closing = "\n" + end if has_own_line else end
        return ThoughtTexts(begin, self.ends_of_thought, closing, begins_inside)

    def new_id(self, index: int, name: str) -> str:
        """Return an id for the call of an index in its message."""
        return f"call_{secrets.token_hex(12)}"

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages and the tools that the template is given.

        A format whose templates know no tools writes them, and earlier calls, into messages.
        """
        return list(messages), [tool.to_dict() for tool in tools] or None

    # -- the parser -------------------------------------------------------------------------------

    def parser(
        self,
        tools: Iterable[Any] | None = None,
        *,
        begins_in_thought: bool = False,
        is_constrained: bool = False,
        content_is_json: bool = False,
        content_is_whole: bool = False,
    ) -> OutputParser:
        """Make the parser of one answer.

        Args:
            tools: those that may be called; without any, nothing is a call.
            begins_in_thought: see the method of this name.
            is_constrained: whether a grammar keeps calls valid. Their arguments then leave as they
                come; else they are kept until a call is whole, for if it is malformed, its text is
                content.
            content_is_json: whether content can only be JSON: its strings may have tags in them.
            content_is_whole: whether all that is neither a thought nor the header of the content is
                content, as it is where a grammar says what that may be; without tools.
        """
        known = {tool.name: tool for tool in tools_of(tools)}
        stream = TextStream()
        message = MessageWriter(stream, self.new_id, holds_calls=not is_constrained)
        if content_is_whole and not known:
            reading = self._read_whole(stream, message, begins_in_thought, content_is_json)
        else:
            reading = self._read(stream, message, known, begins_in_thought, content_is_json)
        return OutputParser(stream, message, reading)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        """Read the call, or calls, after an opener."""
        raise NotImplementedError

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        """Read the call, or calls, with which a message without a tag begins."""
        raise NotImplementedError

    def read_end(self, stream: TextStream, tag: str) -> Reading[None]:
        """Read the tag that ends a call, which may be missing before another tag, and at the end.

        Raises:
            MalformedCall: something else follows.
        """
        if not (yield from stream.skip_space()) or (yield from stream.starts_with(tag)):
            return
        if not (yield from stream.is_at(self._tags_with_tools)):
            raise MalformedCall(f"{tag!r} is missing")

    def _read(
        self,
        stream: TextStream,
        message: MessageWriter,
        tools: Mapping[str, Tool],
        begins_in_thought: bool,
        content_is_json: bool,
    ) -> Reading[None]:
        tags = self._tags_with_tools if tools else self._tags_without_tools
        # JSON is content where calls could have a tag.
        bare_beginnings = "" if content_is_json and self.uses_opener else self.bare_beginnings
        tag = ""
        if begins_in_thought:
            tag = yield from self._read_thought(stream, message)
            tags = Tags((*tags.texts, *self.marks_of_answers))
        plain_until = 0  # what was read as a call, and is none, ends here
        while True:
            if tools and tag in self.openers:
                call = self.read_call(tag, stream, message, tools)
                plain_until = yield from self._try(call, stream, message, had_tag=True)
            elif self.thoughts is not None and tag == self.thoughts.begin:
                tag = yield from self._read_thought(stream, message)
                tags = Tags((*tags.texts, *self.marks_of_answers))
                continue
            elif tools and message.is_empty and bare_beginnings:
                first = yield from stream.skip_space(message.content)
                if first and first in bare_beginnings and stream.position >= plain_until:
                    call = self.read_bare_call(stream, message, tools)
                    plain_until = yield from self._try(call, stream, message, had_tag=False)
            if content_is_json and (yield from stream.skip_space(message.content)):
                is_at_tag = yield from stream.is_at(tags)
                if not is_at_tag:
                    yield from self._read_json(stream, message)
                    return
            tag = yield from stream.up_to(tags, message.content)
            if not tag:
                return
            if stream.position - len(tag) < plain_until:
                tag = ""

    def _read_whole(
        self,
        stream: TextStream,
        message: MessageWriter,
        begins_in_thought: bool,
        content_is_json: bool,
    ) -> Reading[None]:
        """Read what `before_body` is the grammar of, and content to the end."""
        begin = self.thoughts.begin if self.thoughts is not None else ""
        is_inside = begins_in_thought
        if begin and not is_inside:
            yield from stream.skip_space(message.content)
            is_inside = yield from stream.starts_with(begin)
        while is_inside:
            yield from self._read_thought(stream, message)
            yield from stream.skip_space(message.content)
            # A second one, where only a header makes content of what is like a thought.
            is_inside = bool(self.before_content) and (yield from stream.starts_with(begin))
        if self.before_content and not (yield from stream.starts_with(self.before_content)):
            return  # it was cut off
        if content_is_json:
            yield from self._read_json(stream, message)
            return
        tag = yield from stream.up_to(self._control_tags, message.content)
        while (yield from stream.peek()):  # else it is the token that ended the answer
            message.content(tag)
            tag = yield from stream.up_to(self._control_tags, message.content)

    def _read_json(self, stream: TextStream, message: MessageWriter) -> Reading[None]:
        """Read content up to the end of the text."""
        with suppress(MalformedCall):  # cut off, and content all the same
            yield from stream.json_value(message.content)
        while (yield from stream.up_to(self._control_tags, message.content)):
            pass

    def _try(
        self, call: Reading[None], stream: TextStream, message: MessageWriter, *, had_tag: bool
    ) -> Reading[int]:
        """Read a call; if it is none, go back.

        Returns:
            The position up to which the text is content for certain.
        """
        stream.keep()
        try:
            yield from call
        except MalformedCall as error:
            if stream.is_over:
                error.reason = "cut_off"
            message.abandon_call(error, had_tag=had_tag)
            return stream.unread()
        stream.stop_keeping()
        return 0

    def _read_thought(self, stream: TextStream, message: MessageWriter) -> Reading[str]:
        """Read a thought.

        Returns:
            The opener of a call that ended it; else an empty text.
        """
        assert self.thoughts is not None, "the model has no thoughts"
        message.begin_thought()
        while True:
            tag = yield from stream.up_to(self._tags_without_tools, message.reasoning)
            if not tag or tag == self.thoughts.end or tag in self._ends_of_thoughts:
                message.end_thought()
                return tag if tag in self._ends_of_thoughts else ""

    @property
    def _ends_of_thoughts(self) -> frozenset[str]:
        """The openers that are control tokens: no thought speaks of these, so one that was not
        ended ends there."""
        return frozenset(self.openers) & self.template.special_tokens.keys()

    @cached_property
    def _tags_with_tools(self) -> Tags:
        own = (*self.openers, *self.closers, *self.marks, *(self.thoughts or ()))
        return Tags((*own, *self.template.special_tokens))

    @cached_property
    def _tags_without_tools(self) -> Tags:
        return Tags((*self.marks, *(self.thoughts or ()), *self.template.special_tokens))

    @cached_property
    def _control_tags(self) -> Tags:
        return Tags(self.template.special_tokens)

    # -- the grammar ------------------------------------------------------------------------------

    def constraint(
        self,
        tools: Iterable[Any] | None,
        choice: Any = None,
        *,
        parallel: bool = True,
        begins_in_thought: bool = False,
        content: Any = None,
    ) -> StructuredOutputs | None:
        """Return the constraint of an answer; None if it is free.

        With a call that is required, a finished answer is calls alone, after a thought maybe. Else
        content is free, and what follows an opener is a call. Arguments are valid by the schemas;
        keywords that no grammar can follow are refused if a call is required or a tool is strict.

        Args:
            choice: OpenAI's ``tool_choice``, or a `ToolChoice`.
            parallel: whether there may be several calls.
            begins_in_thought: see the method of this name.
            content: the JSON schema of an answer without calls, where that is not free.

        Raises:
            InvalidRequestError: tools or choice are wrong, or ask for what the format cannot say.
        """
        known = tools_of(tools)
        if not known:
            return None
        if not isinstance(choice, ToolChoice):
            choice = ToolChoice.of(choice, known)
        among = choice.among(known)
        is_lenient = choice.mode != "required" and not any(tool.is_strict for tool in among)
        grammar = Grammar(self.template.special_tokens, is_lenient=is_lenient, tools=among)
        parts = []
        if choice.mode == "required" or content is not None:
            parts.append(self._thoughts_before(grammar, begins_in_thought=begins_in_thought))
        elif begins_in_thought:
            parts.append(self._rest_of_thought(grammar))
        if choice.mode == "required":
            parts.append(self._calls(grammar, among, parallel))
        elif content is not None:
            options = self.calls_beside_json(grammar, among, parallel) if among else []
            json = grammar.json(content, is_loose=True, is_lenient=False)
            parts.append(either([*options, f"{grammar.text(self.before_content)} {json}"]))
        else:
            parts.append(self._content(grammar, among, parallel, known))
        return StructuredOutputs(grammar=grammar.source(" ".join(filter(None, parts))))

    def before_body(self, *, begins_in_thought: bool) -> str:
        """Return the grammar of all that comes before content that is constrained, in an answer
        without tools: thoughts, and the header of the content. It may be empty."""
        grammar = Grammar(self.template.special_tokens)
        thoughts = self._thoughts_before(grammar, begins_in_thought=begins_in_thought)
        return grammar.source(f"{thoughts} {grammar.text(self.before_content)}".strip() or '""')

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        """Return the grammar of what follows the opener, with all that closes it: a call of one of
        the tools, or a group of calls if ``parallel`` and the format writes several behind one
        opener."""
        raise NotImplementedError

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        """Return the grammar of a bare call, or of several if ``parallel``. All that tells it from
        content is one lexeme, as `Grammar.after_gap` makes it."""
        raise NotImplementedError

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        """Return a regular expression of the content that would be taken for a bare call, or for
        the beginning of one."""
        raise NotImplementedError

    def calls_beside_json(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool
    ) -> list[str]:
        """Return grammars of calls, of which one holds where JSON may be instead."""
        return [self._calls(grammar, tools, parallel)]

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        if not self.uses_opener:
            return self.bare_call(grammar, tools, parallel)
        call = self.call(grammar, tools, parallel)
        call = grammar.rule(f"{grammar.text(self.openers[0])} {call}")
        again = f"{grammar.gap()} {call}"
        return f"{call} {more_calls(again, are_allowed=parallel and self.repeats)}"

    def _thoughts_before(self, grammar: Grammar, *, begins_in_thought: bool) -> str:
        """Return the grammar of the thoughts before what is constrained."""
        if begins_in_thought:
            return f"{self._rest_of_thought(grammar)} {grammar.gap()}"
        return self._own_thought(grammar)

    def _own_thought(self, grammar: Grammar) -> str:
        """Return the grammar of a thought with which a model may begin."""
        if self.thoughts is None:
            return ""
        begin = grammar.after_gap(self.thoughts.begin)
        return f"({begin} {self._rest_of_thought(grammar)} {grammar.gap()})?"

    def _rest_of_thought(self, grammar: Grammar) -> str:
        assert self.thoughts is not None, "the model has no thoughts"
        return grammar.up_to(self.thoughts.end, self._ends_of_thoughts)

    def _content(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool, known: Sequence[Tool]
    ) -> str:
        """Return the grammar of free text, in which calls are valid.

        Args:
            known: tools that a parser would take for such, beside those that may be called.
        """
        begin = self.thoughts.begin if self.thoughts is not None else ""
        tags = frozenset((*self.openers, begin)) - {""}
        opener = call = ""
        if tools and self.openers and (self.uses_opener or self._ends_of_thoughts):
            opener, call = self.openers[0], self.call(grammar, tools, parallel)
        if self.bare_beginnings:
            not_like = self.like_a_bare_call(known)
            options = [grammar.free(tags, not_like)]
            if tools:
                options.append(self.bare_call(grammar, tools, parallel))
            if call:
                first = f"{grammar.up_to(opener, tags, not_like)} {call}"
                again = f"{grammar.up_to(opener, tags)} {call}"
                again = more_calls(again, are_allowed=parallel and self.repeats)
                rest = f"{again} {grammar.free(tags)}" if self.uses_opener else ""
                options.append(f"{first} {rest}")
            return f"{self._own_thought(grammar)} {either(options)}"
        # Text ends with the first opener or beginning of a thought anyhow, if these are text.
        others = tags - {tag for tag in (opener, begin) if not grammar.has_token(tag)}
        thought = ""
        if begin:
            thought = f"({grammar.up_to(begin, others)} {self._rest_of_thought(grammar)})*"
        if call:
            call = f"{grammar.up_to(opener, others)} {call}"
            # Behind the last call, nothing would end the text before a thought at an opener.
            again = more_calls(f"{call} {thought}", are_allowed=parallel and self.repeats)
            call = f"{again} ({call})?"
        return f"{thought} {call} {grammar.free(tags)}"


def parse(
    format: ChatFormat, text: str, tools: Iterable[Any] | None = None, **options: bool
) -> ParsedMessage:
    """Return the message that a whole text is.

    Args:
        options: those of `ChatFormat.parser`.
    """
    return parse_whole(format.parser(tools, **options), text)
