"""Renders a conversation with a chat template, keeping users' text apart from the template's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.text import chat_messages
from octavo.text.chat_messages import Message
from octavo.text.chat_template import ChatTemplate
from octavo.text.special_tokens import Disguise, SpecialTokens


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    content_format: str,
    variables: Mapping[str, str],
    user_variables: Mapping[str, Any],
    specials: SpecialTokens,
) -> tuple[str, Disguise]:
    """The rendered text, in which users' text is disguised, and the disguise to take off.

    ``variables`` are the model's own (``bos_token`` and so on); ``user_variables`` may replace
    them.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "excludes add_generation_prompt: set that to false", "continue_final_message"
        )
    conversation = chat_messages.check_messages(messages)
    missing = None if template.knows_none else ""
    # A last message that is to go on must have something that can.
    for index in range(len(conversation) - continue_final_message):
        conversation[index] = chat_messages.with_content(conversation[index], missing)
    as_content = _CONTENT_FORMATS.get(content_format)
    if as_content is None:
        raise InvalidRequestError(
            f"must be one of {', '.join(_CONTENT_FORMATS)}, not {content_format!r}",
            "chat_template_content_format",
        )
    conversation = as_content(conversation, template)
    given = {
        "messages": conversation,
        "tools": chat_messages.check_tools(tools),
        "documents": None,
        **{name: chat_messages.plain(value, name) for name, value in user_variables.items()},
    }
    used = (template.source, *template.literals, *chat_messages.all_text(given))
    disguise = Disguise(specials, template.literals, used)
    hidden = {name: chat_messages.map_text(value, disguise.hide) for name, value in given.items()}
    tag = disguise.tag + " "
    continued = _mark_final_message(hidden["messages"], tag) if continue_final_message else ""
    text = template.render(
        {**variables, **hidden, "add_generation_prompt": bool(add_generation_prompt)}
    )
    return (_cut_at_tag(text, tag, continued) if continue_final_message else text), disguise


def _mark_final_message(messages: list[Message], tag: str) -> str:
    """Puts ``tag`` behind the text of the last message; returns that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + tag
        return content
    if not content:
        raise InvalidRequestError(
            "the last message has no content to continue", f"messages[{len(messages) - 1}].content"
        )
    text: str = content[-1]["text"]
    content[-1]["text"] = text + tag
    return text


def _cut_at_tag(text: str, tag: str, continued: str) -> str:
    """The text up to where the last message ends.

    The space at the tag's end tells whether the template trims messages: if it does, the white
    space before the tag would have been trimmed, too.
    """
    if continued.strip() not in text or tag.strip() not in text:
        raise InvalidRequestError(
            "the chat template does not write the last message as it is, so it cannot be continued",
            "continue_final_message",
        )
    end = text.rindex(tag.strip())
    return text[:end] if text.startswith(tag, end) else text[:end].rstrip()


def _as_strings(conversation: list[Message], template: ChatTemplate) -> list[Message]:
    return [chat_messages.join_parts(message) for message in conversation]


def _as_parts(conversation: list[Message], template: ChatTemplate) -> list[Message]:
    return [chat_messages.split_content(message) for message in conversation]


def _as_it_reads(conversation: list[Message], template: ChatTemplate) -> list[Message]:
    return conversation if template.reads_parts else _as_strings(conversation, template)


# By ``chat_template_content_format``.
_CONTENT_FORMATS: dict[str, Callable[[list[Message], ChatTemplate], list[Message]]] = {
    "auto": _as_it_reads,
    "string": _as_strings,
    "openai": _as_parts,
}
