"""Types of latency and throughput that `closed_batch` and `steady_state` share.

Both are computed from the costs of steps alone. Metrics are those of `octavo.measure`: the time to
the first token from the arrival of a request (TTFT), the mean time between two tokens of one answer
(TPOT), and the time to the last token (E2E).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.step_share import PipelineShare, StepShare, WholeShare
from octavo.cost.prediction import Prediction, Source, worst
from octavo.cost.work import Span

# Seconds of a step.
StepTime = Callable[[Sequence[Span]], Prediction]


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """Slots of a batch, and the tokens that a step computes. While others are being answered, a
    step computes no more prompt tokens than ``target_step_seconds`` allow (0 is no bound); see
    `octavo.core.prefill_pacing`. Where a pipeline has ``stages``, each works on such a batch, and a
    prompt goes through all of them; see `octavo.core.step_share`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_step_seconds: float = 0.0
    stages: int = 1


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


def prefill_time(step_time: StepTime, input_len: int, budget: int, stages: int = 1) -> Prediction:
    """Seconds of a prompt that is alone, in as many steps as the budget of tokens and the stages of
    a pipeline make it take."""
    steps = [step_time([chunk]) for chunk in prompt_chunks(input_len, budget, stages)]
    ends = [pipeline_seconds([getattr(step, end) for step in steps], stages) for end in ENDS]
    return between(ends, worst(step.source for step in steps))


def prompt_chunks(input_len: int, size: int, stages: int = 1) -> list[Span]:
    """Split a prompt into pieces of ``size`` tokens, or of the shares that a step of a pipeline
    gets of what is left. A token is sampled after the last."""
    share: StepShare = PipelineShare(stages, size) if stages > 1 else WholeShare()
    chunks, start = [], 0
    while start < input_len:
        left = input_len - start
        count = int(min(size, left, share.prompt_tokens([left])))
        chunks.append(Span(start, count, int(count == left)))
        start += count
    return chunks


def pipeline_seconds(steps: Sequence[float], stages: int) -> float:
    """Seconds until the last of some steps has passed equal stages. A stage computes one step at a
    time, so that a short step waits behind a long one, and no more are under way than there are
    stages."""
    free, ends = [0.0] * stages, [0.0]
    for number, seconds in enumerate(steps):
        arrives = ends[max(0, number - stages + 1)]
        for stage in range(stages):
            free[stage] = arrives = max(arrives, free[stage]) + seconds / stages
        ends.append(arrives)
    return ends[-1]


def decode_time(step_time: StepTime, streams: int, context: int) -> Prediction:
    """Seconds of a step in which each of some streams gets a token after ``context`` others."""
    return step_time([Span(context - 1, 1)] * streams)
