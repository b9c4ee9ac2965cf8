"""Types of the results that a caller gets, and of the deltas that they are built from. Field
names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from octavo.chat_formats.messages import ToolCall, ToolCallDelta
from octavo.core.batch import TokenLogprobs
from octavo.core.stats import DraftStats
from octavo.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# One dict per position: the token that is there, and the most likely ones, by token id.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class Delta:
    """The text and tokens that were added to one sample of a request, as plain values.

    A delta may be read in any thread, and it is what a server's engine sends to its HTTP side. All
    deltas of a sample, joined, are its whole answer, of the same type.

    ``text`` may be empty while tokens are held back (half a character, the start of a stop string).
    ``logprobs`` has an entry for each token if they were asked for, else none. The fields from
    ``finish_reason`` to ``error`` come with the last delta of a sample.
    """

    index: int  # of the sample
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # over all tokens; None where it is not known
    error: str | None = None
    request_id: str = ""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    pooled: Any = None  # of a pooling request: a float32 array of numpy


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``text`` is what the model wrote. Of a chat, ``reasoning``, ``content`` and ``tool_calls`` are
    the parts of it, as they are of a message of OpenAI's: None where there is no such text. Outputs
    that hold what is new have pieces of calls.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string, None for end of text
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: Sequence[ToolCall | ToolCallDelta] = ()
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds, rates in tokens per second, as docs/metrics.md defines them."""

    queue_time: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None
    num_cached_tokens: int = 0
    miss_reason: str = ""  # why not more were cached (``core.prefix_cache.MissReason``)
    num_preemptions: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. ``error`` is the reason, if a completion ended with "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """The new text and tokens of one completion since its last chunk.

    Of a chat, ``reasoning``, ``content`` and ``tool_calls`` are the new parts of its message.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    _build_output: Callable[[], RequestOutput] = field(repr=False, compare=False)
    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()

    @property
    def output(self) -> RequestOutput:
        """All completions up to this chunk, put together when this is read."""
        return self._build_output()


# -- pooling ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of a text, one for each label of the model, in their order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of two texts, which is higher where they go together better."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of pooling as it is: a float32 array of numpy, [values] or [T, values]."""

    data: Any


Result = TypeVar("Result")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Result]):
    """A text and its result. Names are vLLM's; ``error`` is the reason where there is none."""

    request_id: str
    outputs: Result | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
