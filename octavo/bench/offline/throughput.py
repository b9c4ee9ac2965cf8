"""Measures the throughput of many requests that are given at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.latency import check_fits
from octavo.bench.offline.roofline import Roofline, draw
from octavo.bench.offline.session import latencies
from octavo.bench.record import Recorder, columns, peak_rss_bytes
from octavo.measure.statistics import MedianRange, percentile
from octavo.workload.datasets import load_dataset
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, RunTiming

_PERCENTS = (50, 90, 99)
_WARMUP_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """The settings of a run.

    Args:
        dataset: a name of `octavo.workload.datasets.DATASETS`.
        path: its file. Random prompts of ``input_len`` and ``output_len`` tokens need none.
        num_prompts: None is 64 random prompts, and all of a file.
        output_len: None is 128 for random prompts, and as the file says for others.
    """

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int | None = None
    input_len: int = 128
    output_len: int | None = None
    repeat: int = 3
    warmup: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """One repetition. ``mean_batch``: requests in a step, each step weighted by its time;
    ``kv_use``: the largest share of the KV blocks that requests held."""

    elapsed_s: float
    requests_per_s: float
    output_tps: float
    total_tps: float
    num_preemptions: int
    mean_batch: float
    kv_use: float


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Rates are medians over the repetitions, latencies are of all their requests."""

    plan: ThroughputPlan
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    samples: tuple[ThroughputSample, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    peak_rss_bytes: int
    roofline: Roofline
    model: str
    engine: dict[str, Any]
    run: dict[str, Any]

    def spread(self, name: str) -> MedianRange:
        return MedianRange.of([getattr(sample, name) for sample in self.samples])

    @property
    def joules_per_output_token(self) -> float | None:
        """Energy of the GPU, prompts included; None where there is none, or it does not tell."""
        joules = self.run["gpu_energy"]["joules"]
        return None if joules is None else joules / (self.num_output_tokens * len(self.samples))

    def as_json(self) -> dict[str, Any]:
        names = ("elapsed_s", "requests_per_s", "output_tps", "total_tps", "mean_batch", "kv_use")
        spreads = {name: self.spread(name) for name in names}
        return {
            "model": self.model,
            **{name: spread.median for name, spread in spreads.items()},
            "num_preemptions": sum(sample.num_preemptions for sample in self.samples),
            "peak_rss_bytes": self.peak_rss_bytes,
            "joules_per_output_token": self.joules_per_output_token,
            "spread": {name: spread.as_json() for name, spread in spreads.items()},
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            **_percentiles("ttft_ms", self.ttft_s),
            **_percentiles("tpot_ms", self.tpot_s),
            "roofline": self.roofline.as_json(),
            # The JSON of `vllm bench throughput`.
            "elapsed_time": spreads["elapsed_s"].median,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "requests_per_second": spreads["requests_per_s"].median,
            "tokens_per_second": spreads["total_tps"].median,
            "engine": self.engine,
            "run": self.run,
        }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, dict[str, float] | None]:
    if not seconds:
        return {name: None}
    return {name: {f"p{p}": percentile(seconds, p) * 1e3 for p in _PERCENTS}}


def measure_throughput(
    session: OfflineSession,
    plan: ThroughputPlan,
    settings: dict[str, Any],
    advance: Callable[[], None] = lambda: None,
) -> ThroughputResult:
    """Warm up with a few of the requests, then run all of them ``plan.repeat`` times.

    No repetition finds prefixes of another one in the cache; requests of one repetition share
    theirs.

    Raises:
        ConfigError, WorkloadFileError: the requests cannot be read, or do not fit the engine.
    """
    requests, left_out = find_requests(session, plan)
    for repetition in range(plan.warmup):
        session.run(requests[:_WARMUP_PROMPTS], cache_salt=f"warmup {repetition}")
        advance()
    recorder = Recorder.of(session, settings)
    timings: list[RunTiming] = []
    with recorder:
        for repetition in range(plan.repeat):
            timings.append(session.run(requests, cache_salt=f"repetition {repetition}"))
            advance()
    peak = peak_rss_bytes()
    if left_out:
        recorder.warnings.append(
            f"{left_out} of {left_out + len(requests)} requests are longer than the engine's "
            f"context of {session.info['max_model_len']} tokens, and were left out"
        )
    samples = tuple(map(_sample, timings))
    recorder.samples = columns(samples)
    seconds = latencies([stats for timing in timings for stats in timing.requests])
    steps = [step for timing in timings for step in timing.steps]
    roofline = draw(session, steps, recorder.read_bandwidth)
    return ThroughputResult(
        plan,
        len(requests),
        timings[0].num_prompt_tokens,
        timings[0].num_output_tokens,
        samples,
        tuple(seconds["ttft"]),
        tuple(seconds["tpot"]),
        peak,
        roofline,
        session.info["model"],
        session.info,
        recorder.as_json(),
    )


def find_requests(
    session: OfflineSession, plan: ThroughputPlan
) -> tuple[list[WorkloadRequest], int]:
    """Return the requests as token ids, and how many more are too long for the engine's context."""
    if plan.path is None:
        check_fits(session, plan.input_len, plan.output_len or 128)
    num = 64 if plan.num_prompts is None and plan.path is None else plan.num_prompts
    found = load_dataset(
        plan.dataset,
        plan.path,
        num=num,
        tokenizer=session.tokenizer,
        vocab_size=session.vocab_size,
        input_len=plan.input_len,
        output_len=plan.output_len,
        seed=plan.seed,
    )
    requests = []
    for request in found:
        ids = tuple(session.token_ids(request))
        if len(ids) + (request.output_len or 1) > session.info["max_model_len"]:
            continue
        requests.append(
            replace(request, prompt=None, messages=None, prompt_token_ids=ids, input_len=len(ids))
        )
    if not requests:
        raise BenchmarkError(
            f"all {len(found)} requests are longer than the engine's context of "
            f"{session.info['max_model_len']} tokens: ask for fewer tokens, or raise max_model_len"
        )
    return requests, len(found) - len(requests)


def _sample(timing: RunTiming) -> ThroughputSample:
    elapsed = timing.elapsed_s
    in_steps = sum(step.wall_s for step in timing.steps)
    return ThroughputSample(
        elapsed_s=elapsed,
        requests_per_s=len(timing.requests) / elapsed,
        output_tps=timing.num_output_tokens / elapsed,
        total_tps=(timing.num_prompt_tokens + timing.num_output_tokens) / elapsed,
        num_preemptions=timing.num_preemptions,
        mean_batch=sum(step.num_seqs * step.wall_s for step in timing.steps) / in_steps,
        kv_use=max(step.kv_utilisation for step in timing.steps),
    )
