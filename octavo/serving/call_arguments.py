"""Arguments of `LLM` and `AsyncLLM` beside prompts, each of which has an effect or is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.serving.answer_reader import AskedTools
from octavo.serving.chat_templates import ChatTemplates, RenderedChat

_log = logging.getLogger("octavo")

Conversation = Sequence[Mapping[str, Any]]

# Arguments of vLLM without effect here, and what to do instead.
_UNSUPPORTED = {
    "lora_request": "octavo has no adapters: merge them into the model before, and leave it None",
    "tokenization_kwargs": "leave it None, and give token ids where text is to be tokenized "
    "otherwise than by default",
    "mm_processor_kwargs": "octavo reads text alone: leave it None",
    "trace_headers": "octavo writes no traces: leave it None",
    "data_parallel_rank": "there is one engine here: leave it None; octavo serve has replicas, and "
    "chooses one for each request",
    "prompt_text": "give the text as the prompt, or {'prompt': …, 'prompt_token_ids': …}",
    "reasoning_ended": "octavo does not read reasoning apart: leave it None",
}


def refuse_unsupported(**given: Any) -> None:
    """Raise InvalidRequestError for the first argument that asks for an unsupported feature."""
    for name, value in given.items():
        if value is not None and value != {}:
            raise InvalidRequestError(f"is not supported: {_UNSUPPORTED[name]}", name)


def check_streamable(params: SamplingParams) -> None:
    """Raise InvalidRequestError if an answer cannot be read as it is made."""
    is_final = params.output_kind is RequestOutputKind.FINAL_ONLY
    if params.num_samples > params.n and not is_final:
        raise InvalidRequestError("cannot be streamed: the best is known at the end", "best_of")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings that turn a conversation into a prompt: the arguments of ``LLM.chat``, under
    their names."""

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def prompt(self, templates: ChatTemplates, messages: Conversation) -> RenderedChat:
        """Return the prompt of a conversation, with the reader of its answers."""
        variables = self._variables()
        asked = AskedTools.of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        known = templates.of(self.chat_template, tools=asked.tools)
        if unread := known.unread(variables):
            _log.warning("the chat template does not read %s", ", ".join(unread))
        return known.render(
            messages,
            asked,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_content_format=self.chat_template_content_format,
            **variables,
        )

    def _variables(self) -> Mapping[str, Any]:
        given = {} if self.chat_template_kwargs is None else self.chat_template_kwargs
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"must be a mapping, not {given!r}", "chat_template_kwargs")
        for name in given:
            if name in _ARGUMENTS or not isinstance(name, str):
                raise InvalidRequestError(
                    f"{name!r} is an argument of its own: give it there", "chat_template_kwargs"
                )
        return given


_ARGUMENTS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_content_format",
}
