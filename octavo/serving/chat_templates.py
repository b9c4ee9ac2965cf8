"""`ChatTemplates`: what a model's chat templates say about its format, and prompts made with
them."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import ChatTemplateError, InvalidRequestError
from octavo.chat_formats.chat_format import ChatFormat
from octavo.chat_formats.registry import format_of
from octavo.core.thought_texts import ThoughtTexts
from octavo.core.thoughts import ThoughtBudget, ThoughtTokens
from octavo.serving.answer_reader import AnswerReader, AskedTools

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_MAX_CACHED = 8  # templates; requests may bring their own
# How a template tells whether the model is to think: Qwen's and GLM's name, or DeepSeek's and
# Granite's.
_SWITCH = re.compile(r"\benable_thinking\b|\b(?:if|and|or|not|set) thinking\b")
_EFFORTS = ("reasoning_effort", "thinking_effort")  # the latter is Kimi K3's
_NEEDLE = {"octavo_needle": "x"}


class RenderedChat(NamedTuple):
    """A conversation as a prompt, and the reader of its answers."""

    text: str
    token_ids: list[int]
    reader: AnswerReader


class ChatTemplates:
    """The chat templates of one tokenizer. Any threads may share it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: OrderedDict[str, KnownTemplate] = OrderedDict()

    def of(self, chat_template: str | None = None, *, tools: Any = None) -> KnownTemplate:
        """Return the template that is taken for these arguments, as `Tokenizer.chat_prompt` takes
        it.

        Raises:
            ChatTemplateError: the model has none, or it is wrong.
        """
        source = self._tokenizer.chat_template_source(chat_template, tools=tools)
        with self._lock:
            known = self._known.get(source)
            if known is None:
                known = self._known[source] = KnownTemplate(self._tokenizer, source)
                if len(self._known) > _MAX_CACHED:
                    self._known.popitem(last=False)
            self._known.move_to_end(source)
            return known

    def thought_budget(
        self,
        budget: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        texts: ThoughtTexts | Mapping[str, Any] | None = None,
    ) -> ThoughtBudget:
        """Return the mask that ends the thoughts of an answer after so many tokens.

        Args:
            texts: the tags of these thoughts; None: those of the model's own template.

        Raises:
            InvalidRequestError: the model has no thoughts.
        """
        if texts is None:
            texts = self._own_thought_texts(prompt_token_ids)
        texts = ThoughtTexts.of(texts)
        closing = self._tokenizer.encode(
            texts.closing, add_special_tokens=False, parse_special=True
        )
        thoughts = ThoughtTokens.of(texts, partial(_bytes_of, self._tokenizer))
        return ThoughtBudget(thoughts, budget, closing, vocab_size)

    def _own_thought_texts(self, prompt_token_ids: Sequence[int]) -> ThoughtTexts:
        try:
            known = self.of()
        except ChatTemplateError:
            known = KnownTemplate(self._tokenizer, "")
        prompt = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        begins_inside = known.format.begins_in_thought(prompt)
        return known.format.thought_texts(begins_inside=begins_inside)


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


class KnownTemplate:
    """One template, and what it says about the model.

    Attributes:
        format: how the model writes thoughts and calls.
    """

    def __init__(self, tokenizer: Tokenizer, source: str):
        self._tokenizer = tokenizer
        self.source = source
        self.format: ChatFormat = format_of(source, tokenizer.specials.matcher.ids)

    def render(
        self, messages: Sequence[Message], asked: AskedTools, **options: Any
    ) -> RenderedChat:
        """Return the prompt of a conversation.

        Args:
            options: those of `Tokenizer.chat_prompt`, but for its template and tools.

        Raises:
            InvalidRequestError: a message is wrong; its place is named.
            ChatTemplateError: the template fails.
        """
        written, tools = self.format.prompt(_with_names(messages), asked.tools)
        prompt = self._tokenizer.chat_prompt(
            [self._with_arguments(message, i) for i, message in enumerate(written)],
            tools=tools,
            chat_template=self.source,
            **options,
        )
        is_inside = self.format.begins_in_thought(prompt.text)
        thoughts = None
        if self.format.thoughts is not None:
            texts = self.format.thought_texts(begins_inside=is_inside)
            thoughts = ThoughtTokens.of(texts, partial(_bytes_of, self._tokenizer))
        header = self.format.before_content
        has_begun = options.get("continue_final_message") or (
            header and prompt.text.endswith(header)
        )
        reader = AnswerReader(
            self.format,
            asked,
            is_inside,
            thoughts,
            continues_content=bool(has_begun) and not is_inside,
        )
        return RenderedChat(prompt.text, prompt.token_ids, reader)

    @property
    def thinking_switch(self) -> str | None:
        """The variable that tells the template whether the model is to think; None if it has
        none."""
        found = _SWITCH.search(self.source)
        if found is None:
            return None
        return "enable_thinking" if "enable_thinking" in self.source else "thinking"

    @property
    def effort_variable(self) -> str | None:
        """The variable that tells the template how much the model is to think; None if it has
        none."""
        return next((name for name in _EFFORTS if name in self.source), None)

    def unread(self, variables: Iterable[str]) -> list[str]:
        """Return those variables that the template does not read."""
        return [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", self.source)]

    # -- arguments of earlier calls ---------------------------------------------------------------

    def _with_arguments(self, message: Message, index: int) -> Message:
        """Return a message with the arguments of its calls as the template wants them."""
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or not calls:
            return message
        where = f"messages[{index}].tool_calls"
        return {
            **message,
            "tool_calls": [
                self._with_arguments_of(call, f"{where}[{number}]")
                for number, call in enumerate(calls)
            ],
        }

    def _with_arguments_of(self, call: Any, where: str) -> Any:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call  # refused where all messages are checked
        given = function.get("arguments")
        if self._wants_text and isinstance(given, str) and given:
            return call  # the model sees what it wrote, cut off or not
        arguments: Any = _object(given, f"{where}.function.arguments")
        if self._wants_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    @cached_property
    def _wants_text(self) -> bool:
        """True if the template writes the arguments of calls as the text that they are, and fails,
        or writes Python, where they are objects."""
        as_object = self._rendered_call(_NEEDLE)
        if '"octavo_needle"' in as_object:
            return False
        if "octavo_needle" in as_object and "'octavo_needle'" not in as_object:
            return False
        text = json.dumps(_NEEDLE)
        return text in self._rendered_call(text)

    def _rendered_call(self, arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        call = {"type": "function", "id": "call00001", "function": function}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "f", "tool_call_id": "call00001"},
        ]
        try:
            return self._tokenizer.render_chat_template(messages, chat_template=self.source)
        except (ChatTemplateError, InvalidRequestError):
            return ""


def _object(given: Any, where: str) -> Mapping[str, Any]:
    """Return arguments, which may be text, as an object.

    Clients send back calls as they came, and so those that were cut off by the length of an answer.
    Of these the object is what was whole: a text that was begun ends, and a key without a value is
    left out.
    """
    if given is None or given == "":
        return {}
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except RecursionError:
            arguments = None
        except ValueError as error:
            is_longer = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
            arguments = None if is_longer else _begun(given)
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            "must be a JSON object, or the text of one or of its beginning", where
        )
    return arguments


def _begun(text: str) -> Any:
    """Return the value of the beginning of a JSON text; None if it is no such beginning."""
    from pydantic_core import from_json  # a library of the server, for rare texts

    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return None


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the results of tools have the names of these: some templates want
    them, and clients give the ids of the calls alone."""
    names: dict[Any, str] = {}  # of calls, by their ids
    found: list[Message] = []
    for message in messages:
        if isinstance(message, Mapping):  # others are refused where all messages are checked
            names |= _names_of_calls(message.get("tool_calls"))
            name = names.get(str(message.get("tool_call_id")))
            if message.get("role") == "tool" and name and not message.get("name"):
                message = {**message, "name": name}
        found.append(message)
    return found


def _names_of_calls(calls: Any) -> dict[Any, str]:
    """Return the names of the functions that a message calls, by the ids of the calls."""
    names: dict[Any, str] = {}
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            names[str(call.get("id"))] = function["name"]
    return names
