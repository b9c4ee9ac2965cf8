"""A model that is not there: it answers with the words of a fixed sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import octavo
from octavo.chat_formats.messages import ToolCallDelta
from octavo.cli import terminal
from octavo.core.sampling_params import SamplingParams
from octavo.serving.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
)

ANSWER = ("The ", "sky ", "is ", "blue", ".")
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "reference",
    "isa": None,
    "weights_bytes": 10,
    "kv_blocks": 4,
    "block_size": 16,
}


@pytest.fixture(autouse=True)
def _on_a_quiet_machine(quiet_machine: None) -> None:
    """Nothing here probes the machine; a test that wants another result of that says which."""


class FakeLLM:
    """What commands use of ``LLM``. ``on_chunk(i)`` runs before chunk i is handed out."""

    made: list[FakeLLM] = []
    has_chat_template = True
    recommended: dict[str, Any] = {}
    on_chunk: Callable[[int], None] | None = None
    error: Exception | None = None
    request_error: str | None = None
    tool_calls: Sequence[ToolCallDelta] = ()  # that it makes when a user says something
    call_end = "stop"  # the finish_reason of these

    def __init__(self, model: str, **kwargs: Any):
        self.model, self.kwargs = model, kwargs
        self.calls: list[tuple[str, Any, SamplingParams]] = []
        self.closed = self.stream_closed = False
        FakeLLM.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.closed = True

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.recommended)

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(speculation=None)

    def engine_info(self) -> dict[str, Any]:
        return dict(ENGINE)

    def generate(
        self, prompts: list[str], params: SamplingParams, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, params))
        return [self._output(prompt, params, len(ANSWER)) for prompt in prompts]

    def chat(
        self, messages: list[list[dict]], params: SamplingParams, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        self.calls.append(("chat", messages, params))
        return [self._output(m[-1]["content"], params, len(ANSWER)) for m in messages]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[StreamChunk]:
        self.calls.append(("stream", prompt, params))
        return self._stream(prompt, params)

    def stream_chat(
        self, messages: list[dict], params: SamplingParams, tools: Sequence[Any] = ()
    ) -> Iterator[StreamChunk]:
        self.calls.append(("stream_chat", [dict(m) for m in messages], params))
        self.tools = tools
        if tools and messages[-1]["role"] == "user":
            return self._call_tools(params)
        return self._stream(messages[-1]["content"], params)

    def _call_tools(self, params: SamplingParams) -> Iterator[StreamChunk]:
        output = partial(self._output, "", params, len(ANSWER))
        yield StreamChunk(0, "", [0], self.call_end, output, "I call.", "", self.tool_calls)

    def _stream(self, prompt: str, params: SamplingParams) -> Iterator[StreamChunk]:
        if self.error is not None:
            raise self.error
        try:
            for i, text in enumerate(ANSWER):
                if self.on_chunk is not None:
                    self.on_chunk(i)
                build_output = partial(self._output, prompt, params, i + 1)
                reason = build_output().outputs[0].finish_reason
                yield StreamChunk(0, text, [i], reason, build_output, content=text)
        finally:
            self.stream_closed = True

    def _output(self, prompt: str, params: SamplingParams, length: int) -> RequestOutput:
        token_ids = list(range(length))
        logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            logprobs = [
                {7: Logprob(-0.5, 1, "x"), i: Logprob(-1.0 - i, 2, ANSWER[i])} for i in token_ids
            ]
        completions = [
            CompletionOutput(
                index=index,
                text="".join(ANSWER[:length]),
                token_ids=token_ids,
                finish_reason="stop" if length == len(ANSWER) else None,
                cumulative_logprob=-1.5 if logprobs else None,
                logprobs=logprobs,
            )
            for index in range(params.n)
        ]
        metrics = RequestMetrics(0.0, 0.25, 0.05, 0.45, 12.0, 20.0, 1)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, {101: Logprob(float("-inf"), 9, "b")}]
        return RequestOutput(
            request_id="0",
            prompt=prompt,
            prompt_token_ids=[100, 101],
            outputs=completions,
            finished=length == len(ANSWER),
            metrics=metrics,
            prompt_logprobs=prompt_logprobs,
            error=self.request_error,
        )


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """``octavo.LLM`` is FakeLLM, whose settings a test may change; ``made`` lists the instances."""
    cls = type("FakeLLM", (FakeLLM,), {})
    monkeypatch.setattr(FakeLLM, "made", [])
    # Through the dict: monkeypatch would look the name up first, and that imports torch.
    monkeypatch.setitem(vars(octavo), "LLM", cls)
    monkeypatch.setattr(terminal.hub, "resolve", lambda model, **kwargs: Path(model))
    return cls
