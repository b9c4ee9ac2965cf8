"""Items of the input to ``/v1/responses``, and the messages of a chat that they are."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from octavo.base.errors import InvalidRequestError
from octavo.server.api.chats import Message
from octavo.server.api.fields import Body, NoEffect, Object
from octavo.server.api.prompts import MAX_MESSAGES

# How the thought of a reasoning item is written into its ``encrypted_content``, for clients that
# keep their conversations themselves and give nothing else of it back.
_THOUGHT = "octavo-thought:"
MAX_ID = 256

ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


def _only_of_types(noun: str, *types: str) -> BeforeValidator:
    """Return the validator that names the type of a value which is not one of these."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types:
            raise PydanticCustomError(
                noun, "a {noun} of type {kind} is not supported", {"noun": noun, "kind": kind[:40]}
            )
        return value

    return BeforeValidator(check)


class TextPart(Body):
    """A text within a message, a thought, or the result of a call."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Annotated[Any, NoEffect] = None
    logprobs: Annotated[Any, NoEffect] = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

Parts = TypeAliasType(
    "Parts",
    Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
                Discriminator(lambda value: "refusal" if _type(value) == "refusal" else "text"),
                _only_of_types("part", *_TEXT_TYPES),
            ]
        ],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
    ],
)
Content: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class Item(Body):
    id: ItemId | None = None
    status: Annotated[Any, NoEffect] = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Annotated[Any, NoEffect] = None


class CallItem(Item):
    """A call of a function that an answer had."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str = Field(min_length=1, max_length=256)
    arguments: str = Field(description="the text of a JSON object")


class CustomCallItem(Item):
    """A call of a custom tool that an answer had."""

    type: Literal["custom_tool_call"]
    call_id: ItemId
    name: str = Field(min_length=1, max_length=256)
    input: str


class ResultItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId
    output: Content


class ReasoningItem(Item):
    """A thought that an answer had.

    Where there are several forms of it, the first of ``content``, ``encrypted_content`` and
    ``summary`` is taken.
    """

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = None


class ItemReference(Body):
    """An item of an answer that the server has kept."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _kind(value: Any) -> str | None:
    kind = _type(value)
    if kind is not None:
        return kind if isinstance(kind, str) else "message"
    if isinstance(value, dict) and "role" not in value and "id" in value:
        return "item_reference"
    return "item_reference" if isinstance(value, ItemReference) else "message"


AnyItem: TypeAlias = (
    MessageItem | CallItem | CustomCallItem | ResultItem | ReasoningItem | ItemReference
)
InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ResultItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    _only_of_types(
        "item",
        "message",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]
)
Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[InputItems, Tag("items")],
    Discriminator(lambda value: "items" if isinstance(value, list) else "text"),
]


# -- messages --------------------------------------------------------------------------------------


class Conversation:
    """Messages of a chat, made of items. What an assistant thinks, says and calls in a row is one
    message, and so are the system's messages at the beginning.

    Args:
        messages: that come before.
    """

    def __init__(self, messages: Iterable[Message] = ()):
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]

    def add(self, item: AnyItem, note_unread: Callable[[], None] = lambda: None) -> None:
        """Append an item, which is no reference.

        Args:
            note_unread: called for a thought that another server has encrypted: it is left out.
        """
        match item:
            case MessageItem():
                self._add_message(item.role, text_of(item.content))
            case CallItem():
                self._add_call(item.call_id, item.name, item.arguments)
            case CustomCallItem():
                arguments = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
                self._add_call(item.call_id, item.name, arguments)
            case ResultItem():
                content = text_of(item.output)
                result = {"role": "tool", "tool_call_id": item.call_id, "content": content}
                self.messages.append(result)
            case ReasoningItem():
                thought = _thought_of(item)
                if thought is None:
                    note_unread()
                elif thought:
                    self._add_thought(thought)

    def _add_message(self, role: str, text: str) -> None:
        if role == "assistant":
            message = self._open_answer()
            if message.get("content"):
                text = f"{message['content']}\n\n{text}"
            message["content"] = text
        elif len(self.messages) == 1 and _is_systems(role, self.messages[0]["role"]):
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open_answer().setdefault("tool_calls", []).append(call)

    def _add_thought(self, thought: str) -> None:
        message = self._open_answer()
        if "reasoning_content" in message or message.get("content") or "tool_calls" in message:
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
        message["reasoning_content"] = thought

    def _open_answer(self) -> dict[str, Any]:
        """Return the assistant's message at the end; begin one if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _is_systems(*roles: str) -> bool:
    return all(role in ("system", "developer") for role in roles)


def with_instructions(messages: Sequence[Message], instructions: str | None) -> list[Message]:
    """Return messages with the instructions before them, in the system's message if that is the
    first."""
    if not instructions:
        return list(messages)
    if messages and _is_systems(messages[0]["role"]):
        text = f"{instructions}\n\n{messages[0]['content']}"
        return [{"role": "system", "content": text}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


CUSTOM_INPUT = "input"  # the only argument of a custom tool, as the model sees it


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """Return the text of content that may have parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def encrypted_thought(thought: str) -> str:
    """Return a thought as the ``encrypted_content`` of its item. It hides nothing: its client may
    see it anyway."""
    return base64.urlsafe_b64encode((_THOUGHT + thought).encode()).decode()


def _thought_of(item: ReasoningItem) -> str | None:
    """Return the thought of an item; None if it is encrypted, and not by this server."""
    if item.content:
        return text_of(item.content)
    if not item.encrypted_content:
        return text_of(item.summary)
    try:
        text = base64.b64decode(item.encrypted_content, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_THOUGHT) if text.startswith(_THOUGHT) else None


def references(items: Iterable[AnyItem]) -> list[str]:
    """Return the ids that items refer to."""
    return [item.id for item in items if isinstance(item, ItemReference)]


def resolved(items: Sequence[AnyItem], known: Mapping[str, Object]) -> list[AnyItem]:
    """Return the items with those that references stand for.

    Raises:
        InvalidRequestError: an item is not known, or not any more.
    """
    found: list[AnyItem] = []
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            found.append(item)
        elif item.id in known:
            found.append(output_item(known[item.id]))
        else:
            raise InvalidRequestError(
                f"no item with the id {item.id[:80]!r} is kept here", f"input.{index}.id"
            )
    return found


_OUTPUT_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "reasoning": ReasoningItem,
}


def output_item(value: Mapping[str, Any]) -> Any:
    """Return an item of an answer as one of an input."""
    return _OUTPUT_ITEMS[value["type"]].model_validate(dict(value))
