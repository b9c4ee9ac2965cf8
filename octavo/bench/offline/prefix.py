"""Measures the time to first token of many questions about one document, with a prefix cache and
without.

The first question (*cold*) has the document computed; the later ones (*warm*) find it in the cache,
and only they themselves are computed. The same questions go to an engine without a cache, turn by
turn. Questions are asked one at a time, so that each TTFT is that of its own prompt alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.bench.offline.session import OfflineSession
from octavo.measure.statistics import OverSamples
from octavo.workload.datasets import random_requests
from octavo.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The settings of a run; lengths in tokens.

    ``document``: the prefix is cut from it; None takes random tokens. The cache must not contain it
    from the repetition before: each repetition has another random document, or this one after
    another first token.
    """

    prefix_len: int = 1024
    question_len: int = 32
    questions: int = 8
    output_len: int = 16
    repeat: int = 3
    seed: int = 0
    document: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.questions < 2:
            raise ConfigError("one question is always cold: ask for at least two")
        if self.document is not None and len(self.document) < self.prefix_len - 1:
            raise ConfigError(
                f"the document has {len(self.document)} tokens, and the prefix shall have "
                f"{self.prefix_len}: lower prefix_len, or give a longer text"
            )

    def requests(self, repetition: int, vocab_size: int) -> list[WorkloadRequest]:
        """Return the questions of one repetition, each after the document."""
        made_up = random_requests(
            self.questions,
            vocab_size,
            self.question_len,
            self.output_len,
            prefix_len=self.prefix_len if self.document is None else 1,
            seed=self.seed * 1000 + repetition,
        )
        if self.document is None:
            return made_up
        kept = self.document[: self.prefix_len - 1]
        return [_with_document(request, kept) for request in made_up]

    def as_json(self) -> dict[str, int]:
        return {
            "prefix_len": self.prefix_len,
            "question_len": self.question_len,
            "questions": self.questions,
            "output_len": self.output_len,
        }


def _with_document(request: WorkloadRequest, document: tuple[int, ...]) -> WorkloadRequest:
    """Put the document between the first token, which differs by repetition, and the question."""
    assert request.prompt_token_ids is not None
    first, *question = request.prompt_token_ids
    prompt = (first, *document, *question)
    return WorkloadRequest(
        request.request_id,
        prompt_token_ids=prompt,
        input_len=len(prompt),
        output_len=request.output_len,
    )


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The answer to one question, by one engine. Seconds."""

    ttft: float
    e2e: float
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixSample:
    """One repetition: the answers with the cache and without, in the order of the questions."""

    cached: list[TimedAnswer]
    uncached: list[TimedAnswer]

    @property
    def warm_ttft(self) -> float:
        return statistics.median(answer.ttft for answer in self.cached[1:])

    def as_json(self) -> dict[str, Any]:
        return {
            "cached_tokens": [answer.num_cached_tokens for answer in self.cached],
            "ttft_ms": [answer.ttft * 1e3 for answer in self.cached],
            "e2e_ms": [answer.e2e * 1e3 for answer in self.cached],
            "no_cache_ttft_ms": [answer.ttft * 1e3 for answer in self.uncached],
            "no_cache_e2e_ms": [answer.e2e * 1e3 for answer in self.uncached],
        }


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """The result of a run. ``speedup`` is cold over warm, and ``total_speedup`` the time of all
    questions without a cache over that with it, each of one repetition."""

    plan: PrefixPlan
    samples: list[PrefixSample]

    cold_ttft = OverSamples[PrefixSample](lambda sample: sample.cached[0].ttft)
    warm_ttft = OverSamples[PrefixSample](lambda sample: sample.warm_ttft)
    no_cache_ttft = OverSamples[PrefixSample](
        lambda sample: statistics.median(answer.ttft for answer in sample.uncached)
    )
    speedup = OverSamples[PrefixSample](lambda sample: sample.cached[0].ttft / sample.warm_ttft)
    total = OverSamples[PrefixSample](lambda sample: _total_s(sample.cached))
    no_cache_total = OverSamples[PrefixSample](lambda sample: _total_s(sample.uncached))
    total_speedup = OverSamples[PrefixSample](
        lambda sample: _total_s(sample.uncached) / _total_s(sample.cached)
    )

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens, cold questions included."""
        return _hit_rate([answer for sample in self.samples for answer in sample.cached])

    @property
    def warm_hit_rate(self) -> float:
        return _hit_rate([answer for sample in self.samples for answer in sample.cached[1:]])

    @property
    def same_answers(self) -> bool:
        return all(
            with_cache.token_ids == without.token_ids
            for sample in self.samples
            for with_cache, without in zip(sample.cached, sample.uncached, strict=True)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **self.plan.as_json(),
            **{
                f"{name}_ms": getattr(self, name).scaled(1e3).as_json()
                for name in ("cold_ttft", "warm_ttft", "no_cache_ttft", "total", "no_cache_total")
            },
            "speedup": self.speedup.as_json(),
            "total_speedup": self.total_speedup.as_json(),
            "hit_rate": self.hit_rate,
            "warm_hit_rate": self.warm_hit_rate,
            "same_answers": self.same_answers,
        }


def _total_s(answers: Sequence[TimedAnswer]) -> float:
    return sum(answer.e2e for answer in answers)


def _hit_rate(answers: Sequence[TimedAnswer]) -> float:
    return sum(answer.num_cached_tokens for answer in answers) / sum(
        answer.num_prompt_tokens for answer in answers
    )


def measure_prefix(
    with_cache: OfflineSession,
    without_cache: OfflineSession,
    plan: PrefixPlan,
    advance: Callable[[], None] = lambda: None,
) -> PrefixResult:
    """Ask both engines all questions, turn by turn. ``advance`` is called after each question.

    Raises:
        BenchmarkError: a request failed. RequestError: the prompts do not fit the engine.
    """
    warm_up = plan.requests(-1, with_cache.vocab_size)[0]
    for session in (with_cache, without_cache):
        _ask(session, warm_up)
    samples = []
    for repetition in range(plan.repeat):
        sample = PrefixSample([], [])
        for question in plan.requests(repetition, with_cache.vocab_size):
            sample.cached.append(_ask(with_cache, question))
            sample.uncached.append(_ask(without_cache, question))
            advance()
        samples.append(sample)
    return PrefixResult(plan, samples)


def _ask(session: OfflineSession, question: WorkloadRequest) -> TimedAnswer:
    timing = session.run([question])
    (stats,), (token_ids,) = timing.requests, timing.output_token_ids
    if stats.ttft is None or stats.e2e is None:
        raise BenchmarkError(f"question {question.request_id} got no answer")
    return TimedAnswer(
        stats.ttft, stats.e2e, stats.num_prompt_tokens, stats.num_cached_tokens, tuple(token_ids)
    )
