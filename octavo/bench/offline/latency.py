"""Measures the latency of one batch of requests that are given at once, over and over.

Prompts are random, and differ from one repetition to the next, so that nothing is cached.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.bench.offline.roofline import Roofline, draw
from octavo.bench.record import Recorder, columns, peak_rss_bytes
from octavo.measure.statistics import MedianRange, percentile
from octavo.workload.datasets import random_requests

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, RunTiming

# As in the JSON of `vllm bench latency`.
_PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """The settings of a run: ``batch_size`` prompts of exactly ``input_len`` tokens each."""

    input_len: int = 512
    output_len: int = 128
    batch_size: int = 1
    repeat: int = 5
    warmup: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LatencySample:
    """One repetition. Of a batch, TTFT and TPOT are means over its requests.

    Args:
        prefill_tps: prompt tokens of all, from the first step to the last of the first tokens.
        decode_tps: tokens of the steps in which all requests decode, over their time.
        step_overhead_us: the median over those steps of the time outside of the kernels, for a
            token of each request.
    """

    ttft_ms: float
    tpot_ms: float | None
    prefill_tps: float
    decode_tps: float | None
    e2e_ms: float
    step_overhead_us: float | None


@dataclass(frozen=True, slots=True)
class LatencyResult:
    plan: LatencyPlan
    samples: tuple[LatencySample, ...]
    peak_rss_bytes: int
    roofline: Roofline
    model: str
    engine: dict[str, Any]
    run: dict[str, Any]

    def spread(self, name: str) -> MedianRange | None:
        """Return a field of the samples; None where none of them has it."""
        values = [getattr(sample, name) for sample in self.samples]
        return None if None in values else MedianRange.of(values)

    def as_json(self) -> dict[str, Any]:
        latencies = [sample.e2e_ms / 1e3 for sample in self.samples]
        spreads = {name: self.spread(name) for name in LatencySample.__dataclass_fields__}
        return {
            "model": self.model,
            "input_len": self.plan.input_len,
            "output_len": self.plan.output_len,
            "batch_size": self.plan.batch_size,
            **{name: spread and spread.as_json() for name, spread in spreads.items()},
            "peak_rss_bytes": self.peak_rss_bytes,
            "roofline": self.roofline.as_json(),
            "avg_latency": statistics.fmean(latencies),
            "latencies": latencies,
            "percentiles": {str(p): percentile(latencies, p) for p in _PERCENTS},
            "engine": self.engine,
            "run": self.run,
        }


def measure_latency(
    session: OfflineSession,
    plan: LatencyPlan,
    settings: dict[str, Any],
    advance: Callable[[], None] = lambda: None,
) -> LatencyResult:
    """Warm up, run the batch ``plan.repeat`` times, and probe the machine before and after.

    Args:
        settings: those of the user, to be kept with the result.
        advance: called after each batch, warm-up included.

    Raises:
        ConfigError: the engine cannot hold such a batch.
    """
    check_fits(session, plan.input_len, plan.output_len)
    if plan.batch_size > session.info["max_num_seqs"]:
        raise ConfigError(
            f"a batch of {plan.batch_size} needs max_num_seqs of as many, and it is "
            f"{session.info['max_num_seqs']}: raise it, or leave it out"
        )

    def run(repetition: int) -> RunTiming:
        requests = random_requests(
            plan.batch_size,
            session.vocab_size,
            plan.input_len,
            plan.output_len,
            seed=plan.seed * 1000 + repetition,
        )
        timing = session.run(requests)
        advance()
        return timing

    for repetition in range(plan.warmup):
        run(repetition)
    recorder = Recorder.of(session, settings)
    with recorder:
        timings = [run(plan.warmup + repetition) for repetition in range(plan.repeat)]
    peak = peak_rss_bytes()
    preempted = sum(timing.num_preemptions for timing in timings)
    if preempted:
        recorder.warnings.append(
            f"{preempted} requests were preempted: the KV pool is too small for the batch"
        )
    samples = tuple(map(_sample, timings))
    recorder.samples = columns(samples)
    steps = [step for timing in timings for step in timing.steps]
    roofline = draw(session, steps, recorder.read_bandwidth)
    return LatencyResult(
        plan, samples, peak, roofline, session.info["model"], session.info, recorder.as_json()
    )


def one_stream(
    session: OfflineSession, input_len: int, output_len: int, seed: int
) -> LatencySample:
    """Run a random prompt and its answer, alone; ConfigError if they are too long for the
    engine."""
    check_fits(session, input_len, output_len)
    return _sample(
        session.run(random_requests(1, session.vocab_size, input_len, output_len, seed=seed))
    )


def check_fits(session: OfflineSession, input_len: int, output_len: int) -> None:
    """Raise ConfigError if a request of these lengths is longer than the engine's context."""
    limit = session.info["max_model_len"]
    if input_len + output_len > limit:
        raise ConfigError(
            f"{input_len} prompt and {output_len} output tokens are {input_len + output_len}, and "
            f"the engine's context (max_model_len) is {limit}: ask for fewer"
        )


def _sample(timing: RunTiming) -> LatencySample:
    requests = timing.requests
    begin = min(stats.first_scheduled_time or 0.0 for stats in requests)
    prefilled = max(stats.first_token_time or 0.0 for stats in requests)
    computed = sum(stats.num_prompt_tokens - stats.num_cached_tokens for stats in requests)
    tpots = [stats.tpot for stats in requests if stats.tpot is not None]
    decode = [step for step in timing.steps if step.is_pure_decode]
    return LatencySample(
        ttft_ms=statistics.fmean(stats.ttft or 0.0 for stats in requests) * 1e3,
        tpot_ms=statistics.fmean(tpots) * 1e3 if tpots else None,
        prefill_tps=computed / (prefilled - begin),
        decode_tps=(
            sum(step.num_new_tokens for step in decode) / sum(step.wall_s for step in decode)
            if decode
            else None
        ),
        e2e_ms=timing.elapsed_s * 1e3,
        step_overhead_us=(
            statistics.median(step.overhead_s for step in decode) * 1e6 if decode else None
        ),
    )
