"""`MessageWriter`, which makes deltas of the parts of a message that a format reads."""

from __future__ import annotations

from collections.abc import Callable

from octavo.chat_formats.messages import MessageDelta, ToolCallDelta
from octavo.chat_formats.text_stream import MalformedCall, TextStream, load_json

_MAX_WARNINGS = 16
MAX_HELD = 1 << 20  # characters of a call's arguments that are kept until the call is whole


class MessageWriter:
    """The parts of one message, as they come.

    White space at either end of a thought, and where a thought or a call adjoins the content, is
    not part of them.

    Args:
        stream: what is read. It keeps the text of a call until that is certain.
        new_id: makes the id of a call, of its index and its name.
        holds_calls: whether a call is kept until it is whole; it then is JSON, or comes to nothing.
            Else its arguments leave as they come.
    """

    def __init__(self, stream: TextStream, new_id: Callable[[int, str], str], *, holds_calls: bool):
        self._stream = stream
        self.warnings: list[str] = []
        self.malformed: list[str] = []  # reasons why calls were none
        self.is_reasoning = False
        self.has_open_call = False  # a call was begun for the reader, and is not whole
        self._new_id = new_id
        self._holds_calls = holds_calls
        self._delta = MessageDelta()
        self._num_calls = 0
        self._ids: set[str] = set()
        self._call: ToolCallDelta | None = None  # the one that is being read
        self._arguments: list[str] = []
        self._num_held = 0
        self._reasoning = _Trimmed()
        self._content = _Trimmed()
        self._content.keeps_start = True

    def take(self) -> MessageDelta:
        """Return what has come since the last time."""
        delta, self._delta = self._delta, MessageDelta()
        return delta

    def finish(self) -> None:
        """End the message: white space that only could have been inside is so no more."""
        if not self._num_calls:
            self._delta.content += self._content.rest()

    def content(self, text: str) -> None:
        """Append to the content."""
        self._delta.content += self._content.add(text)

    def reasoning(self, text: str) -> None:
        """Append to the thought."""
        self._delta.reasoning += self._reasoning.add(text)

    def begin_thought(self) -> None:
        """Begin a thought. A second one is a new paragraph of the first."""
        self.is_reasoning = True
        self._content.keeps_start = False
        if self._reasoning.has_text:
            self._reasoning.drop_rest()
            self._reasoning.add("\n\n")

    def end_thought(self) -> None:
        self.is_reasoning = False

    @property
    def is_empty(self) -> bool:
        """True if there is neither a call nor content other than white space."""
        return not self._num_calls and not self._content.has_text

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call. ``call_id`` is the one that the text has for it, if it has one. It is not
        taken if an earlier call has it."""
        assert self._call is None, "the last call has not ended"
        if not call_id or call_id in self._ids:
            call_id = self._new_id(self._num_calls, name)
        self._call = ToolCallDelta(self._num_calls, call_id, name)
        self._arguments, self._num_held = [], 0
        if not self._holds_calls:
            self._announce(self._call)
            self._stream.stop_keeping()

    def arguments(self, text: str) -> None:
        """Append to the arguments of the call, which are the text of a JSON object.

        Raises:
            MalformedCall: they are longer than what is kept.
        """
        assert self._call is not None, "no call has begun"
        if not text:
            return
        if self._holds_calls:
            self._num_held += len(text)
            if self._num_held > MAX_HELD:
                raise MalformedCall(
                    f"its arguments have more than {MAX_HELD} characters", "too_large"
                )
            self._arguments.append(text)
            return
        pieces = self._delta.tool_calls
        if pieces and pieces[-1].index == self._call.index:
            pieces[-1].arguments += text
        else:
            pieces.append(ToolCallDelta(self._call.index, arguments=text))

    def end_call(self) -> None:
        """End the call.

        Raises:
            MalformedCall: its arguments are no JSON object.
        """
        assert self._call is not None, "no call has begun"
        if self._holds_calls:
            self._call.arguments = "".join(self._arguments)
            if not isinstance(load_json(self._call.arguments), dict):
                raise MalformedCall("its arguments are no object", "arguments")
            self._announce(self._call)
        self._call, self._arguments = None, []
        self._stream.keep()

    def abandon_call(self, error: MalformedCall, *, had_tag: bool) -> None:
        """Take back what was kept of a call, and warn, unless nothing says that it was to be one.

        What has left already stays.
        """
        if had_tag or self._call is not None:
            self.warn(f"a tool call is malformed: {error}")
            self.malformed.append(error.reason)
        self.has_open_call = self._call is not None and not self._holds_calls
        self._call, self._arguments = None, []

    def warn(self, sentence: str) -> None:
        """Note what is not as it should be; of many such things, the first."""
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(sentence)

    def _announce(self, call: ToolCallDelta) -> None:
        self._delta.tool_calls.append(call)
        self._ids.add(call.id)
        self._num_calls += 1
        self._content.keeps_start = False


class _Trimmed:
    """A text whose white space is given only when more text follows it."""

    def __init__(self) -> None:
        self.keeps_start = False
        self.has_text = False
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """Append, and return what may be shown now."""
        stripped = text.rstrip()
        if not stripped:
            self._held.append(text)
            return ""
        shown = self.rest() + stripped
        if not self.has_text and not self.keeps_start:
            shown = shown.lstrip()
        self.has_text = True
        self._held = [text[len(stripped) :]]
        return shown

    def rest(self) -> str:
        """Return the white space that was held back, unless the text would begin with it."""
        rest = "".join(self._held) if self.has_text or self.keeps_start else ""
        self._held = []
        return rest

    def drop_rest(self) -> None:
        self._held = []
