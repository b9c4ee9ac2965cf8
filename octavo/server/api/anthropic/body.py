"""Bodies of requests to ``/v1/messages``, and the conversations that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from octavo.server.api.chats import Chat, FieldNames, is_to_be_continued
from octavo.server.api.constraints import AskedConstraint, ConstrainedBody, Schema
from octavo.server.api.fields import (
    MAX_INT,
    Body,
    Label,
    NoEffect,
    Object,
    Only,
    StopStrings,
    Unsupported,
)
from octavo.server.api.prompts import MAX_MESSAGES, MAX_TOOLS
from octavo.server.api.requests import GenerationFields
from octavo.server.http.context import IgnoredFields

MAX_TEXTS = 1024  # blocks of a system's message, or of a result

NAMES = FieldNames(
    {
        "messages": "messages.",
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
        "stop": "stop_sequences",
    }
)

# -- content -------------------------------------------------------------------------------------


class Block(Body):
    """A part of a message. ``cache_control`` marks a prefix that is to be cached: all prefixes
    are, and the usage of an answer says so where a request has a mark."""

    cache_control: Object | None = None
    citations: Annotated[Any, NoEffect] = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(Block):
    """A call of a tool that an answer had."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: Object
    caller: Annotated[Any, NoEffect] = None


class ThinkingBlock(Block):
    """A thought that an answer had. Its ``signature`` is not looked at: what a client says that
    the model has thought is as good as any other text of its own."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """A thought that another server has encrypted: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


def _only_of_types(*types: str) -> BeforeValidator:
    """Return the validator that names the type of a block which is not one of these."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types:
            raise PydanticCustomError(
                "block", "a block of type {kind} is not supported", {"kind": kind[:40]}
            )
        return value

    return BeforeValidator(check)


Texts: TypeAlias = Annotated[
    list[Annotated[TextBlock, _only_of_types("text")]],
    Field(max_length=MAX_TEXTS, fail_fast=True),
]
TextOrBlocks: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[Texts, Tag("blocks")],
    Discriminator(lambda value: "blocks" if isinstance(value, list) else "text"),
]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: TextOrBlocks | None = None
    is_error: bool | None = Field(None, description="told to the model where there is no content")


def _type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in _BLOCK_TYPES else "text"


_BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")

AnyBlock: TypeAlias = (
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)
Blocks: TypeAlias = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[ToolUseBlock, Tag("tool_use")]
            | Annotated[ToolResultBlock, Tag("tool_result")]
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
            Discriminator(_type),
            _only_of_types(*_BLOCK_TYPES),
        ]
    ],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[Blocks, Tag("blocks")],
        Discriminator(lambda value: "blocks" if isinstance(value, list) else "text"),
    ]

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


# -- tools and settings --------------------------------------------------------------------------


def _has_schema(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError(
            "tool",
            "a tool of type {kind} is Anthropic's own: give tools with an input_schema",
            {"kind": kind[:40]},
        )
    return tool


class Tool(Body):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: Object = Field(description="a JSON schema")
    strict: bool | None = Field(None, description="refuse a schema that no grammar can follow")
    cache_control: Object | None = None
    input_examples: Annotated[Any, NoEffect] = None
    eager_input_streaming: Annotated[Any, NoEffect] = None  # input is streamed as it comes anyway
    defer_loading: Annotated[Any, NoEffect] = None  # the model sees all tools
    allowed_callers: Annotated[Any, Only((["direct"],))] = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description or "",
            "parameters": self.input_schema,
            **({"strict": True} if self.strict else {}),
        }


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of the tool, with type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="one call at most (no)")

    def for_chat(self) -> Any:
        """Return the choice as a chat has it."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Settings of thoughts. Without them, the model does as its template says."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="tokens of a thought, which then is closed"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text of thoughts out"
    )


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="a JSON schema")
    name: Annotated[Any, NoEffect] = None


class OutputConfig(Body):
    effort: Label | None = Field(None, description="as far as the chat template knows it")
    format: OutputFormat | None = None


# -- bodies --------------------------------------------------------------------------------------


class MessagesFields(ConstrainedBody):
    """Fields that a prompt is made of."""

    model: str | None = Field(None, description="any of /v1/models; it may be left out")
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: TextOrBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[Tool, BeforeValidator(_has_schema)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = Field(None, description="auto, any, tool or none (auto)")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="the older place of a format")
    cache_control: Object | None = Field(None, description="as in the last block")
    chat_template_kwargs: Object | None = Field(None, description="for the template")
    mcp_servers: Unsupported = None
    context_management: Annotated[Any, NoEffect] = None

    def to_chat(self, ignored: IgnoredFields) -> Chat:
        """Return the conversation. A message of the assistant at its end is continued."""
        messages: list[dict[str, Any]] = []
        if system := _joined(self.system):
            messages.append({"role": "system", "content": system})
        for message in self.messages:
            _add(messages, message, ignored)
        continues = is_to_be_continued(messages)
        thinking, choice, output = self.thinking, self.tool_choice, self.output_config
        is_asked = self.tools and (choice is None or choice.type != "none")
        return Chat(
            messages=messages,
            tools=[tool.for_template() for tool in self.tools or ()] if is_asked else None,
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            reasoning_effort=None if output is None else output.effort,
            thinking=None if thinking is None else thinking.type != "disabled",
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    @property
    def marks_prefixes(self) -> bool:
        """True if anything has ``cache_control``."""
        blocks = (block for message in self.messages for block in message.blocks)
        system = () if isinstance(self.system, str) else self.system or ()
        marked = (*blocks, *system, *(self.tools or ()), self)
        return any(part.cache_control is not None for part in marked)

    def _constraints(self) -> Iterator[AskedConstraint]:
        config = self.output_config
        if config is not None and config.format is not None:
            yield AskedConstraint.of("output_config.format.schema", json=config.format.schema_)
        if self.output_format is not None:
            yield AskedConstraint.of("output_format.schema", json=self.output_format.schema_)


class MessagesRequest(MessagesFields):
    """A conversation to be continued."""

    refused = GenerationFields.names_with_effect() | {"prompt", "best_of"}

    max_tokens: int = Field(
        ge=1, le=MAX_INT, description="with thoughts; the context may end an answer before"
    )
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0 is off")
    metadata: Annotated[Any, NoEffect] = None
    service_tier: Annotated[Any, NoEffect] = None
    inference_geo: Annotated[Any, NoEffect] = None
    speed: Annotated[Any, NoEffect] = None
    diagnostics: Annotated[Any, NoEffect] = None
    container: Unsupported = None

    def generation_fields(self) -> GenerationFields:
        """Return the fields that say how to generate, under the names of the other routes."""
        return GenerationFields.of(
            self,
            stop=self.stop_sequences,
            thinking_token_budget=self.thinking and self.thinking.budget_tokens,
        )


class CountTokensRequest(MessagesFields):
    """A conversation whose tokens are to be counted."""


# -- messages of a chat --------------------------------------------------------------------------


def _add(messages: list[dict[str, Any]], message: Message, ignored: IgnoredFields) -> None:
    """Append a message, or several: results of calls are messages of their own. What follows a
    message of the same role is part of it, as it is to Anthropic's models."""
    for block in message.blocks:
        match block:
            case TextBlock():
                _add_text(messages, message.role, block.text)
            case ToolResultBlock():
                text = _joined(block.content) or ("The tool failed." if block.is_error else "")
                messages.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
                )
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                _open(messages, "assistant").setdefault("tool_calls", []).append(call)
            case ThinkingBlock():
                answer = _open(messages, "assistant")
                answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
            case RedactedThinkingBlock():
                ignored.add("messages.redacted_thinking")


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    message = _open(messages, role)
    message["content"] = "\n\n".join(filter(None, (message["content"], text)))


def _open(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the last message, if it is of this role; else begin one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _joined(content: str | Iterable[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(block.text for block in content)
