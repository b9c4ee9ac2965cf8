"""`Toolbox`, the tools of a conversation, and what a call of one comes to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from octavo.base.errors import ConfigError, ToolError
from octavo.chat_formats.messages import ToolCall
from octavo.chat_formats.tools import Tool

# A result goes into the model's context: what is longer would leave no room for anything else.
_MOST_CHARS = 20_000


class RunnableTool(Protocol):
    """A tool with what is behind it."""

    @property
    def tool(self) -> Tool:
        """Its name, description and schema, for the model."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call it, and return its result as text.

        Raises:
            ToolError: the arguments are wrong, or the tool failed; the message is for the model.
        """


class ToolResult(NamedTuple):
    """Result of a call, as the model is told it.

    Args:
        is_error: whether ``text`` is why there is no result.
    """

    text: str
    is_error: bool = False


class Toolbox:
    """Tools by name.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Iterable[RunnableTool]):
        self._tools: dict[str, RunnableTool] = {}
        for each in tools:
            if each.tool.name in self._tools:
                raise ConfigError(f"two tools have the name {each.tool.name!r}: rename one")
            self._tools[each.tool.name] = each

    @property
    def tools(self) -> list[Tool]:
        """Their names, descriptions and schemas, for the model."""
        return [each.tool for each in self._tools.values()]

    def call(self, call: ToolCall) -> ToolResult:
        """Do what the model asks for. Whatever goes wrong becomes the result."""
        try:
            known = self._tools.get(call.name)
            if known is None:
                raise ToolError(f"there is no tool {call.name!r}, only {', '.join(self._tools)}")
            return ToolResult(_shortened(known.run(_arguments(call.arguments))))
        except ToolError as error:
            return ToolResult(_shortened(f"error: {error}"), is_error=True)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments are no JSON object")
    return arguments


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARS:
        return text
    return f"{text[:_MOST_CHARS]}\n[cut here: the result has {len(text):,} characters]"
