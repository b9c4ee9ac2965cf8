"""Workloads of ablations, each of which shows the effect of one kind of optimisation.

A workload is made for the context of the model and for a seed. Every repetition has a seed of its
own, as the prefix cache would contain the prompts of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.bench.offline.closed_loop import run_closed_loop
from octavo.bench.offline.session import OfflineSession
from octavo.measure.statistics import percentile
from octavo.workload.datasets import random_requests
from octavo.workload.requests import WorkloadRequest

# Lengths below are for a context of this many tokens; for a smaller one they shrink with it.
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class WorkloadScale:
    """The scale of a workload: the vocabulary, the tokens of a context, and whether to do less
    work."""

    vocab_size: int
    context: int
    is_quick: bool = False
    avoid: tuple[int, ...] = ()

    def length(self, tokens: int) -> int:
        return max(1, tokens * min(self.context, CONTEXT) // CONTEXT)

    def requests(
        self, count: int, input_len: int, output_len: int, seed: int, prefix_len: int = 0
    ) -> list[WorkloadRequest]:
        return random_requests(
            count,
            self.vocab_size,
            self.length(input_len),
            self.length(output_len),
            prefix_len=self.length(prefix_len) if prefix_len else 0,
            seed=seed,
            avoid=self.avoid,
        )


@dataclass(frozen=True)
class AblationWorkload:
    """A kind of workload: ``count`` requests, with prompts and answers of these lengths in tokens
    (see ``CONTEXT``), after ``prefix_len`` tokens that all prompts begin with.

    ``concurrency``: requests in flight; None gives all at once.
    """

    count: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    concurrency: int | None = None

    def create(self, scale: WorkloadScale, seed: int) -> list[WorkloadRequest]:
        half = max(2, self.count // 2)
        count = min(self.count, half) if scale.is_quick else self.count
        return scale.requests(count, self.input_len, self.output_len, seed, self.prefix_len)


@dataclass(slots=True)
class AblationWork:
    """Figures of a workload that was run. Seconds; TPOT and gaps of all requests together."""

    elapsed_s: float = 0.0
    num_output_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def output_tps(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def ttft_ms(self) -> float:
        return percentile(self.ttfts, 50) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        return percentile(self.tpots, 50) * 1e3 if self.tpots else None

    @property
    def itl_p99_ms(self) -> float | None:
        return percentile(self.gaps, 99) * 1e3 if self.gaps else None


def run_engine(
    session: OfflineSession, workload: AblationWorkload, requests: list[WorkloadRequest]
) -> AblationWork:
    """Run the requests as the engine does."""
    requests = [replace(each, request_id=str(index)) for index, each in enumerate(requests)]
    timing = run_closed_loop(session, requests, workload.concurrency or len(requests))
    latencies = timing.latencies
    return AblationWork(
        timing.elapsed_s,
        timing.num_output_tokens,
        latencies["ttft"],
        latencies["tpot"],
        latencies["itl"],
        {each.request.request_id: each.output_token_ids for each in timing.requests},
    )


def run_without_kv_cache(
    session: OfflineSession, workload: AblationWorkload, requests: list[WorkloadRequest]
) -> AblationWork:
    """Compute every token by a forward pass over the whole text so far, all requests side by side.

    No engine has a setting for that. Here each token is the only one of a new prompt; the session's
    prefix cache must be off, or it would contain that prompt except for its last token.
    """
    assert not session.loaded.config.cache.enable_prefix_caching
    texts = {str(index): list(each.prompt_token_ids or ()) for index, each in enumerate(requests)}
    wanted = {str(index): each.output_len or 1 for index, each in enumerate(requests)}
    work = AblationWork(answers={name: [] for name in texts})
    times: dict[str, list[float]] = {name: [] for name in texts}
    begin = time.perf_counter()
    while unfinished := [name for name in texts if len(times[name]) < wanted[name]]:
        prompts = [
            WorkloadRequest(name, prompt_token_ids=tuple(texts[name]), output_len=1)
            for name in unfinished
        ]
        tokens = session.run(prompts).output_token_ids
        now = time.perf_counter()
        for name, (token,) in zip(unfinished, tokens, strict=True):
            texts[name].append(token)
            work.answers[name].append(token)
            times[name].append(now)
    work.elapsed_s = time.perf_counter() - begin
    for moments in times.values():
        gaps = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
        work.num_output_tokens += len(moments)
        work.ttfts.append(moments[0] - begin)
        work.gaps += gaps
        work.tpots += [sum(gaps) / len(gaps)] if gaps else []
    return work


def describe(requests: Sequence[WorkloadRequest]) -> str:
    """Describe requests: ``8 × 32 + 32``: their number, tokens of prompt and answer; ranges where
    lengths differ."""
    inputs = [len(each.prompt_token_ids or ()) for each in requests]
    outputs = [each.output_len or 0 for each in requests]
    return f"{len(requests)} × {_range(inputs)} + {_range(outputs)}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


# -- the workloads --------------------------------------------------------------------------------


class _UnevenAnswers(AblationWorkload):
    """One answer in four is eight times as long as the others: a batch that waits for it wastes
    slots."""

    def create(self, scale: WorkloadScale, seed: int) -> list[WorkloadRequest]:
        requests = scale.requests(self.count, self.input_len, self.output_len, seed)
        return [
            replace(request, output_len=scale.length(64)) if index % 4 == 0 else request
            for index, request in enumerate(requests)
        ]


class _LongPromptMeanwhile(AblationWorkload):
    """Several answers under way; when the first has ended, a long prompt takes its place.

    The others' gaps at that moment are more than 1 % of all, so their 99th percentile shows it.
    """

    def create(self, scale: WorkloadScale, seed: int) -> list[WorkloadRequest]:
        short = scale.requests(self.count, self.input_len, self.output_len, seed)
        short[0] = replace(short[0], output_len=scale.length(8))
        return [*short, *scale.requests(1, 1536, 1, seed + 1)]


LONE = AblationWorkload(1, 128, 32)
LONE_ANSWER = AblationWorkload(1, 32, 64)
FEW = AblationWorkload(2, 16, 8)
BATCH = AblationWorkload(8, 32, 32)
LONG_CONTEXT = AblationWorkload(4, 512, 32)
UNEVEN_ANSWERS = _UnevenAnswers(16, 32, 8)
LONG_PROMPT_MEANWHILE = _LongPromptMeanwhile(5, 32, 40, concurrency=5)
SHARED_PREFIX = AblationWorkload(6, 32, 4, prefix_len=512, concurrency=1)
SHARED_DOCUMENT = AblationWorkload(16, 32, 32, prefix_len=1536)
