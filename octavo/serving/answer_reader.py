"""`AnswerReader`: how the answer to a conversation is constrained, and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.chat_format import ChatFormat
from octavo.chat_formats.messages import MessageDelta
from octavo.chat_formats.output_parser import OutputParser
from octavo.chat_formats.tools import Tool, ToolChoice, tools_of
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.thoughts import ThoughtCount, ThoughtTokens

if TYPE_CHECKING:
    from octavo.serving.outputs import Delta


@dataclass(frozen=True)
class AskedTools:
    """The tools of a request, and what it says about calls of them.

    Args:
        parallel: whether an answer may have several calls, as it may unless one tool is named.
        are_kept_valid: whether a grammar keeps calls valid, from where the model begins one. It
            does unless every tool says that it is not ``strict``, and the model may do without.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    parallel: bool = True
    are_kept_valid: bool = True

    @classmethod
    def of(
        cls, tools: Iterable[Any] | None, choice: Any = None, *, parallel: bool | None = None
    ) -> AskedTools:
        """Make it of OpenAI's fields: ``tools``, ``tool_choice``, ``parallel_tool_calls``.

        Raises:
            InvalidRequestError: one of them is wrong; its place is named.
        """
        given = list(tools or ())
        known = tools_of(given)
        chosen = ToolChoice.of(choice, known)
        if chosen.mode == "none":
            return cls()
        are_kept_valid = not given or not all(map(_is_free, given))
        is_named = isinstance(choice, Mapping) and choice.get("type", "function") == "function"
        return cls(known, chosen, parallel is not False and not is_named, are_kept_valid)


def _is_free(tool: Any) -> bool:
    """Tell whether a tool says that its calls need not be valid."""
    return not isinstance(tool, Tool) and tool.get("function", tool).get("strict") is False


class PlainParser:
    """Reads answers in which there is nothing but content, as `OutputParser` reads others."""

    is_reasoning = has_open_call = False

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.malformed: list[str] = []

    def push(self, text: str) -> MessageDelta:
        """Return the text as content."""
        return MessageDelta(content=text)

    def finish(self) -> MessageDelta:
        """Return nothing: nothing is held back."""
        return MessageDelta()


AnswerParser: TypeAlias = OutputParser | PlainParser


def read_delta(parser: AnswerParser, delta: Delta) -> MessageDelta:
    """Return what new output adds to the message; with the last delta, all that was held back."""
    parsed = parser.push(delta.text)
    if delta.finish_reason is not None:
        rest = parser.finish()
        parsed.reasoning += rest.reasoning
        parsed.content += rest.content
        parsed.tool_calls += rest.tool_calls
    return parsed


@dataclass(frozen=True)
class AnswerReader:
    """Reads the answers to one prompt, in the format of the template that made it.

    Args:
        begins_in_thought: the prompt ends within a thought.
        thoughts: the tags of the model's thoughts, for counting tokens; None if it has none.
        content_is_json: a constraint lets content be JSON alone, which may have tags in it.
        content_is_whole: a constraint says what comes behind the thoughts.
        continues_content: the prompt ends within the content of the message.
    """

    format: ChatFormat
    asked: AskedTools
    begins_in_thought: bool = False
    thoughts: ThoughtTokens | None = None
    content_is_json: bool = False
    content_is_whole: bool = False
    continues_content: bool = False

    @property
    def finds_parts(self) -> bool:
        """True if answers may have thoughts or calls beside their content."""
        has_header = bool(self.format.before_content)
        return bool(self.asked.tools) or self.thoughts is not None or has_header

    @property
    def _keeps_calls_valid(self) -> bool:
        asked = self.asked
        return bool(asked.tools) and (asked.are_kept_valid or asked.choice.mode == "required")

    def prepare(self, params: SamplingParams) -> tuple[AnswerReader, SamplingParams]:
        """Return the parameters with which answers are generated so that they can be read, and have
        the calls that are asked for; and the reader of such answers.

        Where they may have parts, special tokens become text: some are the tags of parts.

        Raises:
            InvalidRequestError: a constraint of the content excludes the calls, or thoughts have a
                budget, and the model has none.
        """
        changes: dict[str, Any] = {}
        if params.thinking_token_budget is not None:
            texts = self.format.thought_texts(begins_inside=self.begins_in_thought)
            changes["thought_texts"] = texts
        if self.finds_parts:
            changes["skip_special_tokens"] = False
        constraint = self._constraint(params.structured_outputs)
        if constraint != params.structured_outputs:
            changes["structured_outputs"] = constraint
        asked = params.structured_outputs
        is_json = asked is not None and StructuredOutputs.of(asked).constraint.kind == "json"
        is_whole = self.finds_parts and constraint is not None and constraint.preamble is not None
        reader = replace(self, content_is_json=is_json, content_is_whole=is_whole)
        return reader, params.with_changes(**changes) if changes else params

    def parser(self) -> AnswerParser:
        """Make the parser of one answer."""
        if not self.finds_parts:
            return PlainParser()
        return self.format.parser(
            self.asked.tools,
            begins_in_thought=self.begins_in_thought,
            is_constrained=self._keeps_calls_valid,
            content_is_json=self.content_is_json,
            content_is_whole=self.content_is_whole,
        )

    def thought_count(self) -> ThoughtCount | None:
        """Make the counter of one answer's thoughts; None if the model has none."""
        return None if self.thoughts is None else ThoughtCount(self.thoughts)

    def _constraint(self, asked: Any) -> StructuredOutputs | None:
        content = None if asked is None else StructuredOutputs.of(asked)
        if not self._keeps_calls_valid and (content is None or not self.asked.tools):
            return None if content is None else self._after_thought(content)
        if self.continues_content and not self.format.calls_follow_content:
            raise InvalidRequestError(
                "this model calls tools in messages of their own: give no tools",
                "continue_final_message",
            )
        schema = None
        if content is not None and self.asked.choice.mode != "required":
            kind, text = content.constraint
            if kind != "json":
                raise InvalidRequestError(
                    f"{kind!r} leaves no room for calls: give no tools, or ask for JSON",
                    "structured_outputs",
                )
            schema = json.loads(text)
        return self.format.constraint(
            self.asked.tools,
            self.asked.choice,
            parallel=self.asked.parallel,
            begins_in_thought=self.begins_in_thought,
            content=schema,
        )

    def _after_thought(self, content: StructuredOutputs) -> StructuredOutputs:
        """Return the constraint of what comes after the thoughts, and after the header of the
        content."""
        tags, header = self.format.thoughts, self.format.before_content
        is_free = tags is None and not header
        if is_free or self.continues_content or content.begins_after is not None:
            return content
        preamble = self.format.before_body(begins_in_thought=self.begins_in_thought)
        return replace(content, begins_after=header or (tags and tags.end), preamble=preamble)
