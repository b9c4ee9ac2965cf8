"""Bodies of requests to ``/v1/chat/completions``, and the form of its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from octavo.core.sampling_params import MAX_LOGPROBS
from octavo.server.api.answers import Answer, AnswerModel, PromptLogprobs
from octavo.server.api.fields import (
    Body,
    Label,
    MaxTokens,
    NoEffect,
    Object,
    Only,
    Unsupported,
)
from octavo.server.api.prompts import MAX_MESSAGES, MAX_TOOLS
from octavo.server.api.requests import GenerationFields

# -- requests ----------------------------------------------------------------------------------


def _only_text(value: Any) -> Any:
    """Refuse a part that is not text by its type, for which pydantic would report every field."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
        raise PydanticCustomError(
            "part", "a part of type {kind} is not supported", {"kind": kind[:40]}
        )
    return value


class TextPart(Body):
    type: Literal["text"]
    text: str


# Of many wrong parts only the first is reported: reporting all takes long.
TextParts = TypeAliasType(
    "TextParts",
    Annotated[
        list[Annotated[TextPart, BeforeValidator(_only_text)]],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
    ],
)


class FunctionCall(Body):
    name: str = Field(max_length=256)
    arguments: str | None = Field(None, description="a JSON object, as text")


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of the conversation. A message of an answer is accepted as it is in the next
    request."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[TextParts, Tag("parts")],
            Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[Unsupported, NoEffect] = None
    annotations: Annotated[Any, NoEffect] = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def to_dict(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        unused = {"refusal", "annotations", "audio", "function_call"}
        return self.model_dump(exclude_none=True, exclude=unused)


class FunctionTool(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: Object | None = Field(None, description="a JSON schema")
    strict: Annotated[Unsupported, NoEffect] = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class ChatCompletionRequest(GenerationFields):
    """A conversation to be continued.

    Tools are shown to the model through its chat template; a call comes back as the text that the
    model wrote. With ``tool_choice`` "none" they are not shown.
    """

    refused = frozenset({"best_of", "prompt", "inputs"})

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: MaxTokens = Field(None, description="the older name")
    max_completion_tokens: MaxTokens = Field(
        None, description="as many as the context allows, if not given"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="needs logprobs")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[Any, Only(("none", "auto"))] = None
    parallel_tool_calls: bool | None = Field(None, description="calls come back as text")
    documents: Annotated[list[Object], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Label | None = Field(None, description="if the chat template knows it")
    chat_template: str | None = Field(None, description="if the server trusts requests with it")
    chat_template_kwargs: Object | None = Field(None, description="for the template")
    add_generation_prompt: bool | None = Field(None, description="begin a new message (yes)")
    continue_final_message: bool | None = Field(None, description="go on with the last (no)")

    echo: Unsupported = None
    include_reasoning: Annotated[Any, Only((True,))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    verbosity: Annotated[Any, Only(("medium",)), NoEffect] = None
    audio: Unsupported = None
    moderation: Unsupported = None
    prediction: Annotated[Unsupported, NoEffect] = None
    web_search_options: Unsupported = None
    functions: Unsupported = None
    function_call: Annotated[Any, Only(("none", "auto"))] = None
    media_io_kwargs: Annotated[Unsupported, NoEffect] = None
    mm_processor_kwargs: Annotated[Unsupported, NoEffect] = None
    return_prompt_text: Unsupported = None

    def for_template(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages and the tools for the chat template."""
        return self.messages_for_template(), self.tools_for_template()

    def messages_for_template(self) -> list[dict[str, Any]]:
        return [message.to_dict() for message in self.messages]

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


# -- answers -----------------------------------------------------------------------------------


class TopLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class AnswerMessage(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(AnswerModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(AnswerModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
