"""Check a conversation, and convert it to the plain dicts, lists and text that templates expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.text.unicode import clean_text

Message = dict[str, Any]

_MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """Return a copy of JSON-like data in exact built-in types; InvalidRequestError for anything
    else.

    Objects with methods must not reach a template: its sandbox cannot know what they do.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= _MAX_DEPTH:
        raise InvalidRequestError(f"nested more than {_MAX_DEPTH} levels deep", field)
    if isinstance(value, Mapping):
        return {
            _key(key, field): plain(item, f"{field}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(f"expected JSON data, got a {type(value).__name__}", field)


def _key(key: Any, field: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError(f"keys must be text, got a {type(key).__name__}", field)
    return clean_text(str.__str__(key))


def check_messages(messages: Any) -> list[Message]:
    """Return the conversation as new plain dicts, without keys whose value is None.

    Raises InvalidRequestError, naming the field, unless every message has a ``role`` and a
    ``content`` that is text or a list of text parts (an assistant's may be missing beside
    ``tool_calls`` or reasoning).
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("expected a list of messages", "messages")
    if not messages:
        raise InvalidRequestError("the conversation is empty", "messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"expected an object, got a {type(message).__name__}", field)
    checked: Message = {
        key: value for key, value in plain(message, field).items() if value is not None
    }
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError("expected text such as 'user'", f"{field}.role")
    _check_content(checked, field)
    _check_tool_calls(checked, field)
    reasoning = next((checked[name] for name in _REASONING if name in checked), None)
    if reasoning is not None:
        # Templates read one name or another; transformers fills the same two.
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_content(message: Message, field: str) -> None:
    content = message.get("content")
    if content is None:
        others = ("tool_calls", "function_call", *_REASONING)
        if message["role"] == "assistant" and any(name in message for name in others):
            return
        raise InvalidRequestError("expected text or a list of parts", f"{field}.content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"expected text or a list of parts, got a {type(content).__name__}", f"{field}.content"
        )
    for i, part in enumerate(content):
        where = f"{field}.content[{i}]"
        if not isinstance(part, dict):
            raise InvalidRequestError("expected an object with a type", where)
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"only text parts are supported, got {part.get('type')!r:.40}", f"{where}.type"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError("expected text", f"{where}.text")


def _check_tool_calls(message: Message, field: str) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidRequestError("expected a list", f"{field}.tool_calls")
    for i, call in enumerate(calls):
        where = f"{field}.tool_calls[{i}]"
        if not isinstance(call, dict):
            raise InvalidRequestError("expected an object", where)
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError("expected a function with a name", f"{where}.function")


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools as plain dicts (JSON schemas of functions)."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidRequestError("expected a list of tools", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(
                f"expected an object, got a {type(tool).__name__}", f"tools[{i}]"
            )
    checked: list[dict[str, Any]] = plain(tools, "tools")
    return checked


def with_content(message: Message, missing: str | None) -> Message:
    """Return the message with ``missing`` as its content, if it has none.

    Messages with tool calls or reasoning may have none, but nearly all templates add the content to
    a text, or trim it, without checking.
    """
    return message if "content" in message else {**message, "content": missing}


def join_parts(message: Message) -> Message:
    """Return the message with its text parts joined by newlines, for templates that know only
    text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def split_content(message: Message) -> Message:
    """Return the message with its text as a list of one part, for templates that read parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def all_text(value: Any) -> Iterator[str]:
    """Yield every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from all_text(item)
    elif isinstance(value, list):
        for item in value:
            yield from all_text(item)


def map_text(value: Any, change: Any) -> Any:
    """Return plain data with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_text(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    return value
