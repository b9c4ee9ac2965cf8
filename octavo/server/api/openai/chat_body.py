"""Bodies of requests to ``/v1/chat/completions``, and the form of its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from octavo.core.sampling_params import MAX_LOGPROBS
from octavo.server.api.answers import Answer, AnswerModel, PromptLogprobs
from octavo.server.api.chats import Chat
from octavo.server.api.fields import (
    Body,
    Label,
    MaxTokens,
    NoEffect,
    Object,
    Only,
    ToolChoice,
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
    arguments: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Object, Tag("object")],
            Discriminator(lambda value: "object" if isinstance(value, dict) else "text"),
        ]
        | None
    ) = Field(None, description="a JSON object, or the text of one")


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
    strict: bool | None = Field(
        None, description="false for all tools leaves calls that need not be made to the model"
    )


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class ChatCompletionRequest(GenerationFields):
    """A conversation to be continued.

    Tools are shown to the model through its chat template, and its calls come back as
    ``tool_calls``. With ``tool_choice`` "none" they are not shown.
    """

    synonyms = {
        **GenerationFields.synonyms,
        "thinking_budget": "thinking_token_budget",
        "thinking_budget_tokens": "thinking_token_budget",  # llama.cpp's
    }
    refused = frozenset({"best_of", "prompt", "inputs"})

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: MaxTokens = Field(None, description="the older name")
    max_completion_tokens: MaxTokens = Field(
        None, description="as many as the context allows, if not given"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="needs logprobs")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, a function, or allowed_tools (auto)"
    )
    parallel_tool_calls: bool | None = Field(None, description="several calls at once (yes)")
    documents: Annotated[list[Object], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Label | None = Field(
        None, description="none is not to think; as far as the chat template knows it"
    )
    enable_thinking: bool | None = Field(
        None, description="whether to think; as far as the chat template knows it"
    )
    include_reasoning: bool | None = Field(None, description="false leaves thoughts out (yes)")
    separate_reasoning: bool | None = Field(
        None, description="false leaves thoughts in the content, with their tags (yes)"
    )
    chat_template: str | None = Field(None, description="if the server trusts requests with it")
    chat_template_kwargs: Object | None = Field(None, description="for the template")
    add_generation_prompt: bool | None = Field(None, description="begin a new message (yes)")
    continue_final_message: bool | None = Field(None, description="go on with the last (no)")

    echo: Unsupported = None
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

    def to_chat(self) -> Chat:
        """Return the conversation, and how a prompt is made of it."""
        # The template refuses both to begin a message and to continue one.
        begins = self.add_generation_prompt
        return Chat(
            messages=[message.to_dict() for message in self.messages],
            tools=self._tools_for_template(),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            thinking=self.enable_thinking,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=not self.continue_final_message if begins is None else begins,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )

    def _tools_for_template(self) -> list[dict[str, Any]] | None:
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


class AnswerFunction(AnswerModel):
    name: str
    arguments: str


class AnswerToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(AnswerModel):
    """The parts of an answer. Thoughts are there by two names, for clients of either."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class ChatChoice(AnswerModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    warnings: list[str] | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(AnswerModel):
    name: str | None = None
    arguments: str


class ToolCallPiece(AnswerModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatChunkChoice(AnswerModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    warnings: list[str] | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
