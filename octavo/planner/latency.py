"""Types of latency and throughput that `closed_batch` and `steady_state` share.

Both are computed from the costs of steps alone. Metrics are those of `octavo.measure`: the time to
the first token from the arrival of a request (TTFT), the mean time between two tokens of one answer
(TPOT), and the time to the last token (E2E).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.prompt_chunks import PromptChunks
from octavo.cost.pipeline import PipelineClock, StageTimes
from octavo.cost.prediction import Prediction, Source, worst
from octavo.cost.work import Span

# Seconds of a step; in a pipeline, until the same requests may be in the next one.
StepTime = Callable[[Sequence[Span]], Prediction]


class Stages(Protocol):
    """The stages of a pipeline."""

    @property
    def count(self) -> int: ...
    @property
    def prompt_chunks(self) -> PromptChunks:
        """The sizes of pieces of prompts."""
        ...

    def times(self, chunks: Sequence[Span]) -> StageTimes:
        """Return the seconds of a step in each stage; `StepTime` has its ``period``."""
        ...


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """Slots of a batch, and the tokens that a step computes. While others are being answered, a
    step computes no more prompt tokens than ``target_step_seconds`` allow (0 is no bound); see
    `octavo.core.prefill_pacing`. In a pipeline of ``stages``, requests go through all of them, with
    a share in each step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_step_seconds: float = 0.0
    stages: Stages | None = None

    @property
    def num_stages(self) -> int:
        return 1 if self.stages is None else self.stages.count


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, at some percentile of the requests or of their mean."""

    ttft: Prediction
    tpot: Prediction
    e2e: Prediction

    def of(self, metric: str) -> Prediction:
        """``metric``: ttft, tpot or e2e."""
        found: Prediction = getattr(self, metric)
        return found


ENDS = ("value", "low", "high")

ONE_STAGE = StageTimes([1.0])


def between(ends: Sequence[float], source: Source) -> Prediction:
    """Return a prediction from its values at each of the ``ENDS`` of other predictions."""
    return Prediction(ends[0], min(ends), max(ends), source)


class ServiceEstimate(Protocol):
    """Latency and throughput of some traffic."""

    @property
    def is_stable(self) -> bool:
        """True if all of it is answered, and no queue grows without end."""
        ...

    @property
    def streams(self) -> Prediction:
        """Mean number of answers under way at once."""
        ...

    @property
    def requests_per_second(self) -> Prediction: ...

    @property
    def prefill_share(self) -> float:
        """Share of the time of the device that prompts take."""
        ...

    def latency(self, percentile: float | None = None) -> Latency:
        """Latency at a percentile of the requests; None for their mean."""
        ...


def prefill_time(
    step_time: StepTime, input_len: int, budget: int, stages: Stages | None = None
) -> Prediction:
    """Seconds of a prompt that is alone, in as many steps as the budget of tokens and the stages of
    a pipeline make it take."""
    batches = [[chunk] for chunk in prompt_chunks(input_len, budget, stages)]
    steps = [step_time(batch) for batch in batches]
    times = [stage_times(batch, stages) for batch in batches]
    ends = [done_at([getattr(step, end) for step in steps], times) for end in ENDS]
    return between(ends, worst(step.source for step in steps))


def prompt_chunks(input_len: int, size: int, stages: Stages | None = None) -> list[Span]:
    """Split a prompt into pieces of ``size`` tokens, or of as many as bring it through a pipeline
    soonest. A token is sampled after the last."""
    if stages is not None:
        size = min(size, stages.prompt_chunks.size(input_len))
    return [
        Span(start, min(size, input_len - start), int(start + size >= input_len))
        for start in range(0, input_len, size)
    ]


def stage_times(batch: Sequence[Span], stages: Stages | None) -> StageTimes:
    """Return the times of a step in stages; without a pipeline, those of one."""
    return ONE_STAGE if stages is None else stages.times(batch)


def in_stages(seconds: float, times: StageTimes) -> StageTimes:
    """Return the times of a step of which a `StepTime` says the seconds, shared out like others."""
    return times.scaled(seconds / times.period())


def done_at(steps: Sequence[float], times: Sequence[StageTimes]) -> float:
    """Seconds to the end of the last of steps that follow each other, of which a `StepTime` says
    the seconds, and ``times`` how stages share them."""
    clock = PipelineClock(len(times[0].stages))
    for seconds, each in zip(steps, times, strict=True):
        clock.step(in_stages(seconds, each))
    return clock.done


def decode_time(step_time: StepTime, streams: int, context: int) -> Prediction:
    """Seconds of a step in which each of some streams gets a token after ``context`` others."""
    return step_time([Span(context - 1, 1)] * streams)
