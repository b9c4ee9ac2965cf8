"""Measures decoding of many questions about one document at once, with the document's KV read once
a step for all of them, or for each.

The document is computed first. Then all questions are asked together, and the steps in which each
of them decodes a token are timed. An engine that reads the KV anew for every request answers the
same questions, turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.prefix import PrefixPlan
from octavo.bench.offline.session import OfflineSession, StepTiming
from octavo.core.batch import Batch
from octavo.measure.statistics import OverSamples
from octavo.sim.costs import shared_keys
from octavo.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """The steps of one engine in which all questions decode.

    ``kv_bytes``: of a step in the middle, the keys and values that requests attend to, in all
    layers; ``shared_kv_bytes``: those of them that a step need not read again, as it has read them
    for another request.
    """

    num_steps: int
    num_tokens: int
    elapsed_s: float
    kv_bytes: float
    shared_kv_bytes: float
    token_ids: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def step_s(self) -> float:
        return self.elapsed_s / self.num_steps


@dataclass(frozen=True, slots=True)
class PrefixDecodeSample:
    """The runs of one document."""

    together: DecodeRun
    apart: DecodeRun

    def as_json(self) -> dict[str, Any]:
        return {
            "num_steps": self.together.num_steps,
            "step_ms": self.together.step_s * 1e3,
            "separate_step_ms": self.apart.step_s * 1e3,
        }


@dataclass(frozen=True, slots=True)
class PrefixDecodeResult:
    """The result of a run. ``speedup``: decoded tokens per second over those without sharing, each
    of one document."""

    plan: PrefixPlan
    samples: list[PrefixDecodeSample]

    decode_tps = OverSamples[PrefixDecodeSample](lambda sample: sample.together.tokens_per_s)
    separate_decode_tps = OverSamples[PrefixDecodeSample](lambda sample: sample.apart.tokens_per_s)
    step_seconds = OverSamples[PrefixDecodeSample](lambda sample: sample.together.step_s)
    separate_step_seconds = OverSamples[PrefixDecodeSample](lambda sample: sample.apart.step_s)
    speedup = OverSamples[PrefixDecodeSample](
        lambda sample: sample.together.tokens_per_s / sample.apart.tokens_per_s
    )

    @property
    def kv_bytes(self) -> float:
        """Number of bytes of keys and values that a step reads."""
        run = self.samples[0].together
        return run.kv_bytes - run.shared_kv_bytes

    @property
    def separate_kv_bytes(self) -> float:
        return self.samples[0].apart.kv_bytes

    @property
    def same_answers(self) -> bool:
        return all(each.together.token_ids == each.apart.token_ids for each in self.samples)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.plan.as_json(),
            "decode_tps": self.decode_tps.as_json(),
            "separate_decode_tps": self.separate_decode_tps.as_json(),
            "speedup": self.speedup.as_json(),
            "step_ms": self.step_seconds.scaled(1e3).as_json(),
            "separate_step_ms": self.separate_step_seconds.scaled(1e3).as_json(),
            "kv_bytes_per_step": self.kv_bytes,
            "separate_kv_bytes_per_step": self.separate_kv_bytes,
            "same_answers": self.same_answers,
        }


def measure_prefix_decode(
    together: OfflineSession,
    apart: OfflineSession,
    plan: PrefixPlan,
    advance: Callable[[], None] = lambda: None,
) -> PrefixDecodeResult:
    """Ask both engines about each document, turn by turn. ``advance`` is called after each.

    Raises:
        BenchmarkError: a request failed, or there was no step in which all questions decode.
            RequestError: the prompts do not fit the engine.
    """
    samples = []
    for repetition in range(plan.repeat):
        questions = plan.requests(repetition, together.vocab_size)
        samples.append(
            PrefixDecodeSample(_ask_all(together, questions), _ask_all(apart, questions))
        )
        advance()
    return PrefixDecodeResult(plan, samples)


def _ask_all(session: OfflineSession, questions: list[WorkloadRequest]) -> DecodeRun:
    session.run(questions[:1])  # so that the others find the document
    batches: list[tuple[int, int]] = []

    def observe(batch: Batch) -> None:
        if _is_of_all(batch, questions) and all(each.request.block_ids for each in batch.items):
            keys = sum(item.end for item in batch.items)
            block_size = session.loaded.config.cache.block_size
            batches.append((keys, shared_keys(batch.items, block_size)))

    timing = session.run(questions, observe)
    steps = [step for step in timing.steps if _is_of_all(step, questions)]
    if not batches:
        raise BenchmarkError(
            f"there is no step in which all {len(questions)} questions decode: raise output_len or "
            "max_num_seqs, or ask fewer"
        )
    keys, shared = batches[len(batches) // 2]
    token_bytes = session.probe.kv_bytes_per_token
    return DecodeRun(
        len(steps),
        sum(step.num_new_tokens for step in steps),
        sum(step.wall_s for step in steps),
        keys * token_bytes,
        shared * token_bytes,
        timing.output_token_ids,
    )


def _is_of_all(step: Batch | StepTiming, questions: list[WorkloadRequest]) -> bool:
    return step.is_pure_decode and step.num_seqs == len(questions)
