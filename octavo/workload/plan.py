"""Makes requests, and the times at which they are sent, from settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.workload.arrivals import Ramp, arrival_times
from octavo.workload.datasets import TextCounter, load_dataset
from octavo.workload.requests import WorkloadRequest
from octavo.workload.settings import LoadSettings, Workload


class PromptMaker(TextCounter, Protocol):
    """A tokenizer, as far as prompts are made of its tokens."""

    def is_special(self, token_id: int) -> bool: ...


class HasArrival(Protocol):
    """A request whose trace may tell its time of arrival."""

    @property
    def arrival_s(self) -> float | None: ...


@dataclass(frozen=True)
class LoadPlan:
    """The times at which requests are sent.

    Args:
        times: seconds after the start, one for each request, in order; None is a closed loop.
        max_concurrency: requests in flight at most; None has no limit.
        duration_s: after this, no more are sent; those in flight are waited for.
    """

    times: Sequence[float] | None
    max_concurrency: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.times is None and self.max_concurrency is None:
            raise ConfigError("a closed loop needs a number of requests in flight")

    @property
    def is_open_loop(self) -> bool:
        return self.times is not None


def create_requests(workload: Workload, tokenizer: PromptMaker | None) -> list[WorkloadRequest]:
    """Return the requests in order. Raises ConfigError, WorkloadFileError."""
    name = workload.dataset_name
    if tokenizer is None and name in ("random", "prefix_repetition"):
        raise ConfigError(
            f"the prompts of dataset {name!r} are made of a model's tokens: give MODEL or "
            "--tokenizer MODEL"
        )
    lengths = {"random": workload.random_output_len}
    lengths["prefix_repetition"] = workload.prefix_repetition_output_len
    prefix_lens = {"random": workload.random_prefix_len}
    prefix_lens["prefix_repetition"] = workload.prefix_repetition_prefix_len
    return load_dataset(
        name,
        workload.dataset_path,
        num=workload.num_prompts,
        tokenizer=tokenizer,
        input_len=workload.input_len or workload.random_input_len,
        output_len=workload.output_len or lengths.get(name),
        range_ratio=workload.random_range_ratio,
        length_cv=workload.random_length_cv,
        prefix_len=prefix_lens.get(name),
        suffix_len=workload.prefix_repetition_suffix_len,
        num_prefixes=workload.prefix_repetition_num_prefixes,
        seed=workload.seed,
        speedup=workload.speedup,
        max_input_len=workload.max_input_len,
        avoid=() if tokenizer is None else _special_tokens(tokenizer),
    )


def create_plan(settings: LoadSettings, requests: Sequence[HasArrival], seed: int) -> LoadPlan:
    """Return when the requests are sent: by a ramp, at a rate, by their trace, or as others end."""
    times: list[float] | None = None
    if settings.ramp_up_strategy is not None or math.isfinite(settings.request_rate):
        times = arrival_times(
            len(requests),
            settings.request_rate,
            burstiness=settings.burstiness,
            seed=seed,
            ramp=_ramp(settings),
            rescaled=settings.rescale_arrivals,
        )
    elif requests and all(request.arrival_s is not None for request in requests):
        times = [request.arrival_s or 0.0 for request in requests]
    elif settings.max_concurrency is None:
        times = [0.0] * len(requests)
    return LoadPlan(times, settings.max_concurrency, settings.duration)


def _ramp(settings: LoadSettings) -> Ramp | None:
    if settings.ramp_up_strategy is None:
        return None
    start, end = settings.ramp_up_start_rps, settings.ramp_up_end_rps
    assert start is not None and end is not None
    return Ramp(settings.ramp_up_strategy, start, end)  # type: ignore[arg-type]


def _special_tokens(tokenizer: PromptMaker) -> set[int]:
    return {token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
