"""A server under test, with the form of its requests, and the time for which it is waited for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.serving.http_client import HttpClient
from octavo.bench.serving.http_stream import StreamResult, error_message, read_stream
from octavo.workload.requests import WorkloadRequest

_RETRY_SECONDS = 0.25


class ServerError(BenchmarkError):
    """The server under test is not there, or does not answer as it should."""


@dataclass(frozen=True)
class Endpoint:
    """The address and the form of requests.

    Args:
        client: for the server; its creator closes it.
        path: of the endpoint, after the client's prefix.
        fields: of every request's body, such as sampling parameters; they replace all others.
        timeout_s: for one request, connection included; None waits for ever.
    """

    client: HttpClient
    model: str
    backend: str = "openai"
    path: str = "/v1/completions"
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    def body(self, request: WorkloadRequest) -> bytes:
        """Return the body of a request. Raises ServerError if the endpoint does not take such a
        prompt."""
        document: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            document["messages"] = _messages(request)
        else:
            document["prompt"] = _prompt(request)
        if request.output_len is not None:
            document["max_completion_tokens" if self.is_chat else "max_tokens"] = request.output_len
        return json.dumps({**document, **self.fields}).encode()

    async def ask(self, body: bytes, result: StreamResult) -> None:
        """Send a body and fill ``result``; raises nothing but CancelledError."""
        await read_stream(self.client, self.path, body, result, self.timeout_s)


def _messages(request: WorkloadRequest) -> list[Mapping[str, Any]]:
    if request.messages is not None:
        return list(request.messages)
    if request.prompt is None:
        raise ServerError(
            "chat takes text, and this dataset has token ids: give --tokenizer MODEL, or --backend "
            "openai"
        )
    return [{"role": "user", "content": request.prompt}]


def _prompt(request: WorkloadRequest) -> str | list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.prompt is None:
        raise ServerError("this dataset has conversations: give --backend openai-chat")
    return request.prompt


def server_url(base_url: str) -> str:
    """Return ``base_url`` without the ``/v1`` that OpenAI's clients end theirs with: paths
    have it."""
    return base_url.rstrip("/").removesuffix("/v1")


async def served_model(client: HttpClient, otherwise: str | None = None) -> str:
    """Return the first model of ``/v1/models``.

    Args:
        otherwise: the name to use if the server has no such list.

    Raises:
        ServerError: there is no name.
    """
    try:
        return await _first_model(client)
    except ServerError:
        if otherwise is None:
            raise
        return otherwise


async def _first_model(client: HttpClient) -> str:
    advice = "give --model-name"
    try:
        status, body = await asyncio.wait_for(client.fetch("GET", "/v1/models"), 30)
        if status != 200:
            raise ServerError(
                f"the server's /v1/models says {status} ({error_message(body)}): {advice}"
            )
        name = json.loads(body)["data"][0]["id"]
    except OSError as error:
        raise ServerError(f"nothing answers at {client.address}: {_reason(error)}") from error
    except ValueError as error:
        raise ServerError(f"/v1/models cannot be read: {error}: {advice}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"/v1/models names no model: {advice}") from error
    if not isinstance(name, str):
        raise ServerError(f"/v1/models names no model: {advice}")
    return name


@dataclass(frozen=True)
class Patience:
    """The time for which a server is waited for.

    Args:
        unreachable_s: where nothing answers at its address.
        unready_s: where the server answers, but not the first request.
        say: called once with the reason for waiting.
    """

    unreachable_s: float = 5.0
    unready_s: float = 600.0
    say: Callable[[str], None] = field(default=lambda message: None)

    @classmethod
    def of(cls, seconds: float | None, say: Callable[[str], None]) -> Patience:
        """Return the patience that a user asks for; None is the default."""
        return cls(say=say) if seconds is None else cls(seconds, seconds, say)


async def wait_until_listening(client: HttpClient, patience: Patience) -> None:
    """Wait until the server answers at all, with any status. Raises ServerError."""
    deadline = time.monotonic() + patience.unreachable_s
    has_said = False
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            await asyncio.wait_for(client.fetch("GET", "/v1/models"), left)
            return
        except (OSError, ValueError) as error:
            why = _reason(error)
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"nothing answers at {client.address}: {why}; start the server first, or wait "
                    "for it with --ready-check-timeout-sec SECONDS"
                ) from error
        if not has_said:
            has_said = True
            seconds = f"{patience.unreachable_s:g} s"
            patience.say(f"nothing answers at {client.address} ({why}): trying for {seconds}")
        await asyncio.sleep(_RETRY_SECONDS)


def _reason(error: Exception) -> str:
    """Describe an error in few words: an error of several addresses names each of them."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "no connection"
    return str(error) or type(error).__name__


async def wait_until_ready(
    endpoint: Endpoint, request: WorkloadRequest, patience: Patience
) -> None:
    """Wait until a request is answered. Raises ServerError when patience ends, or at once where
    waiting would not help."""
    body = endpoint.body(request)
    started = time.monotonic()
    has_said = False
    while True:
        result = StreamResult(time.perf_counter())
        await endpoint.ask(body, result)
        if result.error is None:
            return
        is_hopeless = 400 <= result.status < 500 and result.status not in (408, 425, 429)
        limit = patience.unready_s if result.status else patience.unreachable_s
        said = f"HTTP {result.status}: " if result.status not in (0, 200) else ""
        if is_hopeless or time.monotonic() - started >= limit:
            raise ServerError(f"a first request to {endpoint.path} failed: {said}{result.error}")
        if not has_said:
            has_said = True
            patience.say(f"the server is not ready ({said}{result.error}): trying for {limit:g} s")
        await asyncio.sleep(_RETRY_SECONDS)
