"""Items of an answer that is being written, and the events that tell of them.

An item is opened, extended and closed; its events say so in OpenAI's order. Whole answers are
written in the same way, and their events dropped.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.chat_formats.messages import ToolCallDelta
from octavo.server.api.openai.responses.items import CUSTOM_INPUT, encrypted_thought

Event = tuple[str, dict[str, Any]]  # its type and fields, but for the sequence number


class OutputItem:
    """One item, as far as it has come.

    Attributes:
        value: the item as answers have it.
    """

    prefix: str  # of its id

    def __init__(self, index: int, **fields: Any):
        self._index = index
        self.value: dict[str, Any] = {
            "id": f"{self.prefix}_{secrets.token_hex(24)}",
            **fields,
            "status": "in_progress",
        }

    def begin(self) -> Iterator[Event]:
        """Yield the events of its begin."""
        yield self._item_event("added")

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events of its end, with all that it has."""
        self.value["status"] = status
        yield self._item_event("done")

    def _item_event(self, what: str) -> Event:
        # A copy: the item goes on, and the event is written later.
        item = {**self.value}
        return f"response.output_item.{what}", {"output_index": self._index, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.value["id"], "output_index": self._index}
        return f"response.{kind}", {**place, **fields}


class _TextItem(OutputItem):
    """An item with one part, a text that comes in pieces."""

    text_event: str
    part: Mapping[str, Any]

    def __init__(self, index: int, **fields: Any):
        super().__init__(index, **fields)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield self._part_event("added")

    def add(self, text: str) -> Iterator[Event]:
        """Yield the event of more text."""
        self._pieces.append(text)
        yield self._event(f"{self.text_event}.delta", content_index=0, delta=text, **self._extra())

    def end(self, status: str) -> Iterator[Event]:
        yield self._event(
            f"{self.text_event}.done", content_index=0, text=self.text, **self._extra(whole=True)
        )
        yield self._part_event("done")
        self.value["content"] = [self._part()]
        yield from super().end(status)

    def _part(self) -> dict[str, Any]:
        return {**self.part, "text": self.text, **self._extra(whole=True)}

    def _part_event(self, what: str) -> Event:
        return self._event(f"content_part.{what}", content_index=0, part=self._part())

    def _extra(self, *, whole: bool = False) -> dict[str, Any]:
        return {}


class ThoughtItem(_TextItem):
    """The model's thought.

    Args:
        encrypts: whether it comes in the form too in which clients without a memory keep it.
    """

    prefix = "rs"
    text_event = "reasoning_text"
    part = {"type": "reasoning_text"}

    def __init__(self, index: int, *, encrypts: bool = False):
        super().__init__(index, type="reasoning", summary=[], content=[])
        self._encrypts = encrypts

    def end(self, status: str) -> Iterator[Event]:
        if self._encrypts:
            self.value["encrypted_content"] = encrypted_thought(self.text)
        yield from super().end(status)


class MessageItem(_TextItem):
    """The model's text."""

    prefix = "msg"
    text_event = "output_text"
    part = {"type": "output_text", "annotations": []}

    def __init__(self, index: int):
        super().__init__(index, type="message", role="assistant", content=[])
        self._logprobs: list[dict[str, Any]] = []
        self._new_logprobs: list[dict[str, Any]] = []

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Take the log-probabilities of the tokens of the text that comes next."""
        self._new_logprobs = logprobs
        self._logprobs += logprobs

    def _extra(self, *, whole: bool = False) -> dict[str, Any]:
        if whole:
            return {"logprobs": list(self._logprobs)}
        new, self._new_logprobs = self._new_logprobs, []
        return {"logprobs": new}


class CallItem(OutputItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, index: int, call: ToolCallDelta):
        super().__init__(index, type="function_call", call_id=call.id, name=call.name, arguments="")
        self._pieces: list[str] = []

    def add(self, arguments: str) -> Iterator[Event]:
        """Yield the event of more of its arguments."""
        self._pieces.append(arguments)
        yield self._event("function_call_arguments.delta", delta=arguments)

    def end(self, status: str) -> Iterator[Event]:
        arguments = self.value["arguments"] = "".join(self._pieces)
        name = self.value["name"]
        yield self._event("function_call_arguments.done", name=name, arguments=arguments)
        yield from super().end(status)


class CustomCallItem(OutputItem):
    """A call of a custom tool, whose text is known when the arguments that hold it are whole."""

    prefix = "ctc"

    def __init__(self, index: int, call: ToolCallDelta):
        super().__init__(index, type="custom_tool_call", call_id=call.id, name=call.name, input="")
        self._pieces: list[str] = []

    def add(self, arguments: str) -> Iterator[Event]:
        """Take more of the arguments."""
        self._pieces.append(arguments)
        yield from ()

    def end(self, status: str) -> Iterator[Event]:
        text = self.value["input"] = _custom_input("".join(self._pieces))
        if text:
            yield self._event("custom_tool_call_input.delta", delta=text)
        yield self._event("custom_tool_call_input.done", input=text)
        yield from super().end(status)


def _custom_input(arguments: str) -> str:
    """Return the only argument of a custom tool, or what there is of it if the call was cut off."""
    try:
        text = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
