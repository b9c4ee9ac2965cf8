"""Bodies of Ollama's routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import MAX_LOGPROBS
from octavo.server.api.chats import Chat, FieldNames, Length, is_to_be_continued
from octavo.server.api.constraints import AskedConstraint, ConstrainedBody, Schema
from octavo.server.api.fields import (
    MAX_INT,
    Body,
    Label,
    NoEffect,
    Object,
    Only,
    Stop,
    TokenIds,
    Unsupported,
)
from octavo.server.api.prompts import MAX_MESSAGES, MAX_TOOLS
from octavo.server.api.requests import GenerationFields
from octavo.server.engine.generation import EngineFacts
from octavo.server.http.context import IgnoredFields

MAX_CONTEXT = 1 << 18  # tokens of ``context``

NAMES = FieldNames(
    {
        "messages": "messages.",
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "reasoning_effort": "think",
        "enable_thinking": "think",
        **{
            name: f"options.{name}"
            for name in (
                "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty",
                "frequency_penalty", "seed", "stop",
            )
        },
    }
)  # fmt: skip

Text = Annotated[str, Tag("text")]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?[0-9]{1,9}(?:\.[0-9]{1,3})?)(|ms|s|m|h)")
KeepAlive = Annotated[
    Annotated[float, Tag("number")] | Annotated[Label, Tag("text")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "number"),
]


class Options(Body):
    """Options of a model. Those of how it is loaded have no effect: it is loaded already."""

    refused = GenerationFields.names_with_effect()

    num_predict: int | None = Field(
        None, ge=-2, le=MAX_INT, description="tokens at most; -1 and -2 are as the context allows"
    )
    num_ctx: int | None = Field(
        None, ge=1, le=MAX_INT, description="tokens of prompt and answer; no more than the server's"
    )
    num_keep: int | None = Field(
        None, ge=-1, le=MAX_INT, description="tokens that a context shift keeps, if one is made"
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="below 0 is none")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 and below are off")
    top_p: float | None = Field(None, ge=0, le=1, description="0 is the likeliest token alone")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=1000)
    repeat_last_n: int | None = Field(
        None, ge=-1, le=MAX_INT, description="0 switches penalties off; they are of all tokens else"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: Stop | None = None
    mirostat: Annotated[Any, Only((0,))] = None
    tfs_z: Annotated[Any, Only((1, 1.0))] = None
    mirostat_tau: Annotated[Any, NoEffect] = None
    mirostat_eta: Annotated[Any, NoEffect] = None
    penalize_newline: Annotated[Any, NoEffect] = None
    numa: Annotated[Any, NoEffect] = None
    num_batch: Annotated[Any, NoEffect] = None
    num_gpu: Annotated[Any, NoEffect] = None
    main_gpu: Annotated[Any, NoEffect] = None
    low_vram: Annotated[Any, NoEffect] = None
    f16_kv: Annotated[Any, NoEffect] = None
    use_mmap: Annotated[Any, NoEffect] = None
    use_mlock: Annotated[Any, NoEffect] = None
    num_thread: Annotated[Any, NoEffect] = None

    def sampling(self, facts: EngineFacts, ignored: IgnoredFields) -> dict[str, Any]:
        """Return the fields that say how to sample, under the names of the other routes."""
        if self.num_ctx is not None and self.num_ctx > facts.max_model_len:
            ignored.add("options.num_ctx")
        if self.repeat_last_n is not None and self.repeat_last_n > 0:
            ignored.add("options.repeat_last_n")
        has_penalties = self.repeat_last_n != 0
        shifts = facts.sink_windows.context_shift and self.num_keep is not None
        is_greedy = self.temperature == 0 or self.top_p == 0
        return {
            "temperature": 0.0 if is_greedy else self.temperature,
            "top_p": self.top_p or None,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "seed": self.seed,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty if has_penalties else 1.0,
            "presence_penalty": self.presence_penalty if has_penalties else None,
            "frequency_penalty": self.frequency_penalty if has_penalties else None,
            "n_keep": self.num_keep if shifts and (self.num_keep or 0) >= 0 else None,
        }


class GenerationBody(ConstrainedBody):
    """Fields of chats and of prompts."""

    refused = GenerationFields.names_with_effect()
    is_chat: ClassVar[bool]

    model: ModelName
    stream: bool | None = Field(None, description="as lines of JSON (yes)")
    format: Schema = Field(None, description="json, or a JSON schema")
    options: Options | None = None
    think: (
        Annotated[
            Annotated[bool, Tag("switch")] | Annotated[Label, Tag("effort")],
            Discriminator(lambda value: "effort" if isinstance(value, str) else "switch"),
        ]
        | None
    ) = Field(None, description="whether, or how much; as far as the chat template knows it")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="needs logprobs")
    keep_alive: KeepAlive | None = Field(
        None, description="of several models; seconds, or a text such as 5m. The only one stays"
    )
    truncate: bool | None = Field(None, description="drop the oldest turns of a long prompt (yes)")
    shift: Annotated[Any, NoEffect] = None

    @property
    def keep_seconds(self) -> float | None:
        """Seconds for which the model is to stay in memory; below 0 is for ever, None was not said.

        Raises:
            InvalidRequestError: it is no time.
        """
        given = self.keep_alive
        if given is None or not isinstance(given, str):
            return given
        match = _DURATION.fullmatch(given.strip())
        if match is None:
            raise InvalidRequestError(
                f"{given[:40]!r} is no time such as 300, 30s, 5m or -1", "keep_alive"
            )
        return float(match[1]) * _UNITS[match[2]]

    @property
    def effort(self) -> str | None:
        """The effort of thinking, if that is said."""
        return self.think if isinstance(self.think, str) else None

    @property
    def is_to_think(self) -> bool | None:
        """True or False if the request says whether to think."""
        return self.think is not False if self.think is not None else None

    @property
    def length(self) -> Length:
        """The limits of prompt and answer."""
        options = self._chosen
        most = options.num_predict
        return Length(
            max_tokens=None if most is None or most < 0 else max(most, 1),
            is_bound=True,
            drops_oldest=self.truncate is not False,
            context=options.num_ctx,
        )

    @property
    def _chosen(self) -> Options:
        return self.options or Options.model_construct()

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def num_logprobs(self) -> int | None:
        """Number of the likeliest tokens that are asked for; None if no log-probabilities are."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def generation_fields(self, facts: EngineFacts, ignored: IgnoredFields) -> GenerationFields:
        """Return the fields that say how to generate, under the names of the other routes."""
        sampling = self._chosen.sampling(facts, ignored)
        return GenerationFields.of(self, stream=self.streams, **sampling)

    def _constraints(self) -> Iterator[AskedConstraint]:
        if self.format is None or self.format == "":
            return
        if self.format == "json":
            yield AskedConstraint.of("format", json_object=True)
        else:
            yield AskedConstraint.of("format", json=self.format)


# -- /api/chat -----------------------------------------------------------------------------------


class CalledFunction(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: Object | None = None
    index: Annotated[Any, NoEffect] = None
    description: Annotated[Any, NoEffect] = None


class Call(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Unsupported = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[Any, NoEffect] = None


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: Object | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] | None = None
    function: Function
    items: Annotated[Any, NoEffect] = None


class ChatRequest(GenerationBody):
    """A conversation to be continued."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def to_chat(self) -> Chat:
        """Return the conversation."""
        messages = _messages(self.messages or ())
        continues = is_to_be_continued(messages)
        return Chat(
            messages=messages,
            tools=[
                {"type": "function", **tool.function.model_dump(exclude_none=True)}
                for tool in self.tools or ()
            ]
            or None,
            reasoning_effort=self.effort,
            thinking=self.is_to_think,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )


def _messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as other routes have them, where calls have ids, and results these."""
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in given:
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            made["tool_calls"] = []
            for call in message.tool_calls:
                call_id, name = call.id or f"call{num_calls:05}", call.function.name
                num_calls += 1
                waiting.append((call_id, name))
                function = {"name": name, "arguments": call.function.arguments or {}}
                made["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if message.role == "tool":
            made |= _answered(message, waiting)
        messages.append(made)
    return messages


def _answered(message: Message, waiting: list[tuple[str, str]]) -> dict[str, str]:
    """Return the id, and the name, of the call that a message has the result of: the one that it
    names, else the first without a result."""
    for call_id, name in waiting:
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name):
            waiting.remove((call_id, name))
            return {"tool_call_id": call_id, "name": name}
    found = {"tool_call_id": message.tool_call_id, "name": message.tool_name}
    return {key: value for key, value in found.items() if value}


# -- /api/generate -------------------------------------------------------------------------------


class GenerateRequest(GenerationBody):
    """A prompt to be answered, or a text to be completed."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = Field(None, description="the text behind what is to be filled in")
    raw: bool | None = Field(None, description="the prompt is a text, and no message (no)")
    context: Annotated[list[int], TokenIds(MAX_CONTEXT)] | None = Field(
        None, description="of the answer before"
    )
    template: Annotated[Any, Only(("",))] = None
    images: Unsupported = None
    width: Annotated[Any, NoEffect] = None
    height: Annotated[Any, NoEffect] = None
    steps: Annotated[Any, NoEffect] = None

    def to_chat(self) -> Chat:
        """Return the prompt as a conversation."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt or ""})
        return Chat(messages=messages, reasoning_effort=self.effort, thinking=self.is_to_think)


# -- models --------------------------------------------------------------------------------------


class ShowRequest(Body):
    """A model to describe."""

    synonyms = {"name": "model"}

    model: ModelName
    verbose: Annotated[Any, NoEffect] = None
    system: Annotated[Any, NoEffect] = None
    template: Annotated[Any, NoEffect] = None
    options: Annotated[Any, NoEffect] = None


class ModelRequest(Body):
    """A model that is to be fetched, sent, made or removed."""

    synonyms = {"name": "model"}

    model: ModelName
    stream: bool | None = None


class CopyRequest(Body):
    """A model that is to get another name."""

    source: ModelName
    destination: ModelName


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; an empty one if the call is cut off."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
