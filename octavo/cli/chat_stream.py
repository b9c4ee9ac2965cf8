"""`ChatStream`, one answer of ``octavo chat`` as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.chat_formats.messages import MessageDelta
from octavo.chat_formats.tools import Tool
from octavo.core.sampling_params import SamplingParams
from octavo.serving.answer_reader import AskedTools, PlainParser
from octavo.serving.chat_templates import ChatTemplates

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput
    from octavo.chat_formats.output_parser import OutputParser


class ChatStream(Iterator[MessageDelta]):
    """The parts of one answer: content, and with tools, calls and thoughts.

    Attributes:
        output: the answer up to the last part.
    """

    def __init__(
        self,
        llm: LLM,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: Sequence[Tool],
    ):
        self.output: RequestOutput | None = None
        self._parser: OutputParser | PlainParser = PlainParser()
        if tools:
            asked = AskedTools.of(tools)
            declared = [tool.to_dict() for tool in tools]
            template = ChatTemplates(llm.get_tokenizer()).of(tools=declared)
            rendered = template.render(messages, asked)
            prompt = {"prompt": rendered.text, "prompt_token_ids": rendered.token_ids}
            self._parser = rendered.reader.parser()
            self._chunks = llm.stream(prompt, rendered.reader.params(params))
        else:
            self._chunks = llm.stream_chat(messages, params)

    def __next__(self) -> MessageDelta:
        chunk = next(self._chunks)
        self.output = chunk.output
        delta = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            end = self._parser.finish()
            delta = MessageDelta(
                delta.reasoning + end.reasoning,
                delta.content + end.content,
                delta.tool_calls + end.tool_calls,
            )
        return delta

    def close(self) -> None:
        """End the answer here."""
        self._chunks.close()
