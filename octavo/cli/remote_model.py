"""`RemoteModel`, a model of a running server, with what `octavo chat` uses of ``LLM``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.messages import ToolCallDelta
from octavo.cli import UsageError
from octavo.cli.parser import did_you_mean, near
from octavo.cli.server_client import ServerClient, ServerError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs

# Sent in any case: the server has defaults of its own for them, which are the model's.
_ALWAYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass
class RemoteAnswer:
    """An answer as far as it has come; ``usage`` and ``timings`` are the server's."""

    error: str | None = None
    finish_reason: str | None = None
    ttft: float | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return its figures on one line, as those of an answer made here."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        prompt = f"{self.usage.get('prompt_tokens', '?')} prompt tokens"
        reason = f" ({self.finish_reason})" if self.finish_reason else ""
        parts = [
            prompt + (f" ({cached} cached)" if cached else ""),
            f"{self.usage.get('completion_tokens', '?')} output tokens{reason}",
        ]
        if self.ttft is not None:
            parts.append(f"TTFT {self.ttft * 1e3:,.0f} ms")
        rate = self.timings.get("predicted_per_second")
        if isinstance(rate, int | float):
            parts.append(f"{rate:,.1f} tokens/s")
        return ", ".join(parts)


@dataclass
class RemoteChunk:
    """The new parts of a message; see `octavo.serving.outputs.StreamChunk`."""

    output: RemoteAnswer
    finish_reason: str | None
    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class RemoteModel:
    """A model of a server.

    Args:
        name: one of its models; None is the first.

    Raises:
        ServerError: it cannot be reached.
        UsageError: it has no such model.
    """

    has_chat_template = True  # the server says if not

    def __init__(self, client: ServerClient, name: str | None = None):
        self._client = client
        try:
            models = {each["id"]: each for each in client.get("/v1/models")["data"]}
        except (KeyError, TypeError):
            raise ServerError(f"{client.url} does not list its models") from None
        if not models:
            raise ServerError(f"{client.url} has no model")
        if name is not None and name not in models:
            hint = did_you_mean(near(name, models)) or f"; it has {', '.join(models)}"
            raise UsageError(f"{client.url} has no model {name}{hint}")
        self.name = next(iter(models)) if name is None else name
        self._recommended = models[self.name].get("sampling_defaults") or {}

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend."""
        known = {each.name for each in dataclasses.fields(SamplingParams)}
        recommended = {name: each for name, each in self._recommended.items() if name in known}
        try:
            return SamplingParams(**recommended)
        except (InvalidRequestError, TypeError):
            return SamplingParams()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Generator[RemoteChunk, None, None]:
        """Answer a conversation, and yield the answer piece by piece.

        Raises:
            ServerError: the server refuses it, or breaks off.
        """
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream_options": {"include_usage": True},
            **_fields(params),
            **({"tools": list(tools)} if tools else {}),
        }
        answer, started = RemoteAnswer(), time.monotonic()
        with contextlib.closing(self._client.events("/v1/chat/completions", body)) as events:
            for event in events:
                answer.usage = event.get("usage") or answer.usage
                answer.timings = event.get("timings") or answer.timings
                for choice in event.get("choices", ()):
                    chunk = _chunk(choice, answer)
                    if answer.ttft is None and (chunk.content or chunk.reasoning):
                        answer.ttft = time.monotonic() - started
                    yield chunk


def _chunk(choice: Mapping[str, Any], answer: RemoteAnswer) -> RemoteChunk:
    delta = choice.get("delta") or {}
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    calls = [
        ToolCallDelta(
            call["index"],
            call.get("id") or "",
            (call.get("function") or {}).get("name") or "",
            (call.get("function") or {}).get("arguments") or "",
        )
        for call in delta.get("tool_calls") or ()
    ]
    reason = choice.get("finish_reason")
    return RemoteChunk(
        answer,
        "stop" if reason == "tool_calls" else reason,
        delta.get("reasoning_content") or delta.get("reasoning") or "",
        delta.get("content") or "",
        calls,
    )


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as fields of a request: those that say something."""
    usual = SamplingParams(max_tokens=None)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(SamplingParams):
        value = getattr(params, each.name)
        if each.name in _ALWAYS or (value is not None and value != getattr(usual, each.name)):
            found[each.name] = value
    if found.get("logit_bias"):
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"].items()}
    if isinstance(asked := found.get("structured_outputs"), StructuredOutputs):
        found["structured_outputs"] = {
            each.name: value
            for each in dataclasses.fields(asked)
            if (value := getattr(asked, each.name)) != each.default
        }
    return found
