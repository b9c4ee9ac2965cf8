"""The body of requests to ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from octavo.core.sampling_params import MAX_LOGPROBS
from octavo.server.api.chats import Chat, FieldNames, Message
from octavo.server.api.constraints import AskedConstraint, Schema, named_schema
from octavo.server.api.fields import (
    Body,
    Label,
    MaxTokens,
    NoEffect,
    Object,
    Only,
    StreamOptions,
    ToolChoice,
    Unsupported,
)
from octavo.server.api.openai.responses.items import (
    CUSTOM_INPUT,
    AnyItem,
    Conversation,
    Input,
    ItemId,
    MessageItem,
    with_instructions,
)
from octavo.server.api.prompts import MAX_TOOLS
from octavo.server.api.requests import GenerationFields
from octavo.server.http.context import IgnoredFields

NAMES = FieldNames(
    {
        "messages": "input.",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "enable_thinking": "reasoning.effort",
        "prompt": "input",
    }
)

# -- parts of the body ---------------------------------------------------------------------------


class Reasoning(Body):
    effort: Label | None = Field(
        None, description="none is not to think; as far as the chat template knows it"
    )
    summary: Annotated[Any, NoEffect] = None  # thoughts are there in full
    generate_summary: Annotated[Any, NoEffect] = None


class TextFormat(Body):
    """The form that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = Field(None, description="for people")
    description: str | None = Field(None, description="for people")
    schema_: Schema = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(
        None, description="objects have no properties but those of the schema, if it does not say"
    )

    def constraint(self, field: str) -> AskedConstraint | None:
        """Return what it asks for; None if that is any text."""
        if self.type == "json_schema":
            return named_schema(field, {"schema": self.schema_, "strict": self.strict})
        return AskedConstraint.of(field, json_object=True) if self.type == "json_object" else None


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, NoEffect] = None


class ResponsesFunction(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: Object | None = Field(None, description="a JSON schema")
    strict: bool | None = Field(
        None, description="false for all tools leaves calls that need not be made to the model"
    )
    defer_loading: Annotated[Any, NoEffect] = None
    output_schema: Annotated[Any, NoEffect] = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        names = {"type", "name", "description", "parameters", "strict"}
        return self.model_dump(include=names, exclude_none=True)

    def shown(self) -> dict[str, Any]:
        """Return the tool as answers repeat it."""
        return {"description": None, "parameters": None, "strict": None} | self.model_dump(
            exclude={"defer_loading", "output_schema"}
        )


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, description="told to the model, which may not follow it")


class CustomTool(Body):
    """A tool that takes a text. To the model it is a function with one argument."""

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Annotated[Any, NoEffect] = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        texts = [self.description or ""]
        if self.format is not None and self.format.definition:
            syntax = self.format.syntax or "lark"
            texts.append(f"The input follows this {syntax} grammar:\n{self.format.definition}")
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        }
        return {
            "type": "function",
            "name": self.name,
            "description": "\n\n".join(filter(None, texts)),
            "parameters": parameters,
        }

    def shown(self) -> dict[str, Any]:
        """Return the tool as answers repeat it."""
        return self.model_dump(exclude_none=True, exclude={"defer_loading"})


# Tools that OpenAI runs itself, which a model can do without. Others of that kind are refused.
_DISPENSABLE = ("web_search", "image_generation", "tool_search")


def _without_hosted(tools: Any, info: ValidationInfo) -> Any:
    """Drop the tools that OpenAI runs, which clients offer to any server, and note them."""
    if not isinstance(tools, list):
        return tools
    ignored = info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()
    kept = []
    for tool in tools[: MAX_TOOLS + 1]:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_DISPENSABLE) and not ignored.strict:
            ignored.add(f"tools.{kind}")
        else:
            kept.append(tool)
    return kept


def _runs_here(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom"):
        raise PydanticCustomError(
            "tool",
            "a tool of type {kind} is not run here: give functions and custom tools",
            {"kind": kind[:40]},
        )
    return tool


Tools = Annotated[
    list[
        Annotated[
            Annotated[ResponsesFunction, Tag("function")] | Annotated[CustomTool, Tag("custom")],
            Discriminator(lambda tool: "custom" if _is_custom(tool) else "function"),
            BeforeValidator(_runs_here),
        ]
    ],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(_without_hosted),
]


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, CustomTool) or (isinstance(tool, dict) and tool.get("type") == "custom")


class ResponseStreamOptions(StreamOptions):
    include_usage: Annotated[bool | None, NoEffect] = None  # the last event has it anyway
    continuous_usage_stats: Annotated[bool | None, NoEffect] = None


# -- the body ------------------------------------------------------------------------------------

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

Includes = Annotated[list[Label], Field(max_length=32, fail_fast=True)]


class ChatFields(Body):
    """Fields that a prompt is made of."""

    model: str | None = Field(None, description="any of /v1/models; it may be left out")
    input: Input = Field(description="a text, or items")
    instructions: str | None = Field(None, description="of the system, for this answer alone")
    previous_response_id: ItemId | None = Field(None, description="of an answer that is kept")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, a function, or allowed_tools (auto)"
    )
    parallel_tool_calls: bool | None = Field(None, description="several calls at once (yes)")
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto drops the oldest turns of a prompt that is too long"
    )
    chat_template_kwargs: Object | None = Field(None, description="for the template")
    conversation: Unsupported = None
    prompt: Unsupported = None

    @property
    def items(self) -> list[AnyItem]:
        """The items of the input."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    def messages_after(
        self, before: Iterable[Message], items: Iterable[AnyItem], ignored: IgnoredFields
    ) -> list[Message]:
        """Return the messages of the conversation, without instructions.

        Args:
            before: messages of the answers that this one follows.
            items: of the input, with those that references stand for.
        """
        conversation = Conversation(before)
        for item in items:
            conversation.add(item, lambda: ignored.add(f"input.{ENCRYPTED_REASONING}"))
        return list(conversation.messages)

    def to_chat(self, messages: Sequence[Message]) -> Chat:
        """Return the conversation as a chat, with the instructions."""
        is_asked = self.tools and self.tool_choice != "none"
        return Chat(
            messages=with_instructions(messages, self.instructions),
            tools=[tool.for_template() for tool in self.tools or ()] if is_asked else None,
            tool_choice=_as_function(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _as_function(choice: Any) -> Any:
    """Return a choice of a custom tool as one of the function that stands for it."""
    if isinstance(choice, Mapping) and choice.get("type") == "custom":
        return {**choice, "type": "function"}
    return choice


class ResponsesRequest(ChatFields, GenerationFields):
    """A conversation to be continued by items: thoughts, messages, and calls of functions.

    Fields of chats that say how to generate are the same here.
    """

    synonyms = {
        "repeat_penalty": "repetition_penalty",
        "thinking_budget": "thinking_token_budget",
    }
    refused = frozenset({"messages", "inputs", "best_of", "max_completion_tokens"})

    max_output_tokens: MaxTokens = Field(
        None, description="with thoughts; as many as the context allows, if not given"
    )
    include: Includes | None = Field(
        None, description=f"{ENCRYPTED_REASONING}, {LOGPROBS}; others are of tools that OpenAI runs"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"needs {LOGPROBS} to be included"
    )
    metadata: Annotated[dict[Label, Label] | None, Field(max_length=16)] = Field(
        None, description="comes back with the answer"
    )
    store: bool | None = Field(None, description="keep the answer for later requests (yes)")
    background: bool | None = Field(
        None, description="answer at once, and make the answer for a later GET (no)"
    )
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Annotated[int | None, NoEffect] = None  # of tools that OpenAI runs
    context_management: Annotated[Any, NoEffect] = None
    client_metadata: Annotated[Any, NoEffect] = None

    n: Annotated[Any, Only((1,))] = None
    max_tokens: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    truncation_side: Unsupported = None
    add_special_tokens: Unsupported = None
    request_id: Annotated[Any, NoEffect] = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    def _constraints(self) -> Iterator[AskedConstraint]:
        yield from super()._constraints()
        if self.text is not None and self.text.format is not None:
            asked = self.text.format.constraint("text.format")
            if asked is not None:
                yield asked


class InputTokensRequest(ChatFields):
    """A conversation whose tokens are to be counted."""
