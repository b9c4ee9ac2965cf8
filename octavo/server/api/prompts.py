"""`PromptRenderer`, which makes token ids of texts, and of conversations by the chat template.

All of it happens in the background, for small prompts in a thread of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from octavo.base.errors import InvalidRequestError, PromptTooLongError
from octavo.server.http.background import briefly_in_background, in_background
from octavo.server.http.context import IgnoredFields
from octavo.serving.answer_reader import AskedTools
from octavo.serving.chat_templates import ChatTemplates, KnownTemplate, RenderedChat
from octavo.text.decoders import ByteDecoder
from octavo.text.tokenizer import Tokenizer

SMALL_TEXT = 4 << 10  # characters whose tokens and template take about a millisecond
MAX_MESSAGES = 4096
MAX_TOOLS = 128

# Variables of the template that come from the request; chat_template_kwargs must not replace them.
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "chat_template_content_format",
    "continue_final_message",
    "documents",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}

P = ParamSpec("P")
T = TypeVar("T")


class PromptRenderer:
    """The tokenizer and the chat template of the served model. It changes neither.

    Args:
        chat_template: used instead of the model's own.
        trust_request_chat_template: whether requests may bring one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        trust_request_chat_template: bool = False,
    ):
        self.tokenizer = tokenizer
        self._chat_templates = ChatTemplates(tokenizer)
        self._chat_template = chat_template
        self._trusts_requests = trust_request_chat_template
        self.no_chats = ""  # why conversations are refused, once that is known of the model

    async def text(
        self,
        prompt: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            parse_special: whether names of special tokens in the text stand for these tokens.

        Raises:
            PromptTooLongError: by its length it must have more than ``limit`` tokens.
        """
        await self._check_length(prompt, limit)
        return await _run(
            len(prompt) <= SMALL_TEXT,
            self.tokenizer.encode,
            prompt,
            add_special_tokens=add_special_tokens,
            parse_special=parse_special,
        )

    async def words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words, in each way that they may be written."""
        if not words:
            return ()
        is_small = 2 * sum(map(len, words)) <= SMALL_TEXT
        return await _run(is_small, self.tokenizer.encode_words, words)

    async def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each of several texts, as it stands within another one."""
        if not texts:
            return []
        is_small = sum(map(len, texts)) <= SMALL_TEXT
        return await _run(is_small, self._encode_all, texts)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        thinking: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        limit: int | None = None,
        ignored: IgnoredFields | None = None,
    ) -> RenderedChat:
        """Return the prompt of a conversation, which has the form of OpenAI's API, with the reader
        of its answers.

        A field that the template does not use is refused, but for ``tools``, which then are written
        into messages, and for those that clients send to any model: ``chat_template_kwargs``,
        ``thinking`` and ``reasoning_effort``. Where the template only knows whether to
        think, an effort of "none" is not to; what it knows nothing of is noted in ``ignored``
        (unless that is strict). A developer's message is a system message to templates that do not
        know that role.

        Raises:
            InvalidRequestError: a field of the conversation is wrong, or the template cannot render
                it.
            ChatTemplateError: there is no template, or it failed.
            PromptTooLongError: by their length the messages must have more than ``limit`` tokens.
        """
        if self.no_chats:
            raise InvalidRequestError(self.no_chats, "model")
        _check_count(messages, MAX_MESSAGES, "messages")
        _check_count(tools or (), MAX_TOOLS, "tools")
        # Templates and variables of the request may take long, however short they are.
        is_plain = not chat_template_kwargs and chat_template is None
        is_small = is_plain and _is_small((messages, tools, documents))
        if chat_template is not None and not self._trusts_requests:
            raise InvalidRequestError(
                "templates of requests are not run here (trust_request_chat_template is off)",
                "chat_template",
            )
        if not is_small:
            for text in _contents(messages):
                await self._check_length(text, limit)
        rendering = _run(
            is_small,
            self._render,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            documents=documents,
            reasoning_effort=reasoning_effort,
            thinking=thinking,
            ignored=ignored or IgnoredFields(),
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
        )
        try:
            return await rendering
        except InvalidRequestError as error:
            raise _with_dotted_field(error) from None

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of tokens."""
        is_small = len(token_ids) <= SMALL_TEXT
        return await _run(
            is_small, self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    # -- templates ---------------------------------------------------------------------------

    async def template_source(self) -> str:
        """Return the chat template; raise ChatTemplateError if there is none."""
        return await _run(True, self.tokenizer.chat_template_source, self._chat_template)

    async def has_thoughts(self) -> bool:
        """True if the model writes thoughts; raises ChatTemplateError if there is no template."""
        known = await _run(True, self._chat_templates.of, self._chat_template)
        return known.format.thoughts is not None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: Any,
        parallel_tool_calls: bool | None,
        documents: Sequence[Mapping[str, Any]] | None,
        reasoning_effort: str | None,
        thinking: bool | None,
        ignored: IgnoredFields,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any],
        add_special_tokens: bool,
        **options: bool,
    ) -> RenderedChat:
        asked = AskedTools.of(tools, tool_choice, parallel=parallel_tool_calls)
        variables = self._check_variables(chat_template_kwargs)
        known = self._chat_templates.of(chat_template or self._chat_template, tools=asked.tools)
        effort = _thinking_variables(known, reasoning_effort, thinking, ignored)
        for name in known.unread(variables):
            _ignore(f"chat_template_kwargs.{name}", ignored)
        if documents and "documents" not in known.source:
            raise _unused("documents")
        if documents:
            variables["documents"] = documents
        if "developer" not in known.source:
            messages = [_as_system(message) for message in messages]
        prompt = known.render(messages, asked, **options, **{**effort, **variables})
        bos = self.tokenizer.bos_token_id
        if not add_special_tokens or bos is None:
            return prompt
        return prompt._replace(token_ids=[bos, *prompt.token_ids])  # beside the template's own

    def _check_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in _RESERVED or name in self.tokenizer.named_tokens:
                raise InvalidRequestError(
                    f"{name!r} cannot be set by requests here", "chat_template_kwargs"
                )
        return dict(variables)

    # -- lengths -----------------------------------------------------------------------------

    async def _check_length(self, text: str, limit: int | None) -> None:
        if limit is None or len(text) <= SMALL_TEXT:
            return
        longest = await in_background(lambda: self._longest_token)
        if longest is not None and len(text) > limit * longest:
            raise PromptTooLongError(
                f"a text of {len(text)} characters has more tokens than the {limit} of the "
                "context: shorten it",
                limit + 1,
                limit,
            )

    @cached_property
    def _longest_token(self) -> int | None:
        """Number of bytes of the longest token, None if tokens need not stand for all of a text."""
        if not isinstance(self.tokenizer.decoder, ByteDecoder):
            return None
        lengths = (len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size))
        return max(lengths, default=1)


async def _run(is_small: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if is_small:
        return await briefly_in_background(function, *args, **kwargs)
    return await in_background(function, *args, **kwargs)


def _check_count(values: Sequence[Any], most: int, field: str) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"at most {most} are allowed, not {len(values)}", field)


def _is_small(value: Any) -> bool:
    """True if JSON-like data has little text and few values; checks no more than that."""
    size, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            size += len(value)
            waiting += value.values() if size <= SMALL_TEXT else ()
        elif isinstance(value, Sequence):
            size += len(value)
            waiting += value if size <= SMALL_TEXT else ()
        if size > SMALL_TEXT:
            return False
    return True


def _with_dotted_field(error: InvalidRequestError) -> InvalidRequestError:
    """Return the error with its field written as in all errors of bodies:
    ``messages.0.content``."""
    if error.field is None:
        return error
    return error.with_field(re.sub(r"\[(\d+)\]", r".\1", error.field))


def _contents(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of messages; their other parts are checked elsewhere."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, Mapping) and "text" in part
            )


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a developer's message as a system message, for templates that do not know that
    role."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _thinking_variables(
    known: KnownTemplate,
    effort: str | None,
    thinking: bool | None,
    ignored: IgnoredFields,
) -> dict[str, Any]:
    """Return the variables that tell a template whether, and how much, the model is to think."""
    variables: dict[str, Any] = {}
    switch = known.thinking_switch
    if effort and switch is not None:
        variables[switch] = effort != "none"
    if effort and effort != "none" and known.effort_variable is not None:
        variables[known.effort_variable] = effort
    elif effort and not variables and (effort != "none" or known.format.thoughts is not None):
        _ignore("reasoning_effort", ignored)
    if thinking is not None and switch is not None:
        variables[switch] = thinking
    elif thinking is not None and (thinking or known.format.thoughts is not None):
        _ignore("enable_thinking", ignored)
    return variables


def _ignore(field: str, ignored: IgnoredFields) -> None:
    """Note a field that the template does not use, or refuse it."""
    if ignored.strict:
        raise _unused(field)
    ignored.add(field)


def _unused(field: str) -> InvalidRequestError:
    return InvalidRequestError("the chat template of this model does not use it", field)
