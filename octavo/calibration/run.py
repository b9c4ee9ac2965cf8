"""One minute on the machine itself: an engine's steps, timed and put into a `Profile`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.calibration.fit import TimedStep, fit
from octavo.calibration.store import Profile, model_and_processor
from octavo.calibration.trials import Size, Trial, trials
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import passes
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, StepTiming
    from octavo.cost.measured import MeasuredSteps

# What a quick and a thorough calibration may take, about.
SECONDS, QUICK_SECONDS = 60.0, 15.0
_MOST_TURNS = 5  # of each load
# Of the engine that was timed, by the names of its settings.
_SETTINGS = (
    *("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("prefix_caching", "batching", "chunked_prefill"),
)

Progress = Callable[[str, float], None]
"""Is told what runs, and the share of the time that has gone."""


def calibrate(
    session: OfflineSession,
    *,
    quick: bool = False,
    progress: Progress = lambda what, share: None,
) -> MeasuredSteps:
    """Time the steps of an engine, in turns through all loads for as long as there is time.

    BenchmarkError: the engine is too small for there to be enough steps.
    """
    budget = QUICK_SECONDS if quick else SECONDS
    planned = trials(_size_of(session), quick=quick)
    begin = time.perf_counter()
    turns: list[list[TimedStep]] = []
    while not turns or (len(turns) < _MOST_TURNS and time.perf_counter() - begin < budget / 2):
        turns.append([])
        for trial in planned:
            gone = time.perf_counter() - begin
            progress(trial.name, min(1.0, gone / budget))
            if gone > budget and len(turns) > 1:
                break
            turns[-1] += _steps_of(session, trial, seed=len(turns))
    steps = [step for turn in turns for step in turn]
    return fit(steps, _drift(turns))


def profile_of(session: OfflineSession, steps: MeasuredSteps, measured_at: str) -> Profile:
    """What was measured of an engine, with what it holds for."""
    info = session.info
    return Profile(about(session), {name: info[name] for name in _SETTINGS}, steps, measured_at)


def about(session: OfflineSession) -> dict[str, Any]:
    """What the steps of an engine depend on, and so a profile of it."""
    info = session.info
    return {
        **model_and_processor(hub.resolve(session.args.model)),
        **{name: info[name] for name in ("device", "kernels", "isa", "dtype", "kv_dtype")},
        "threads": session.probe.num_threads,
        "activations": session.args.activations,
    }


def _size_of(session: OfflineSession) -> Size:
    config = session.loaded.config
    return Size(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_model_len,
        config.cache.num_blocks * config.cache.block_size,
    )


def _steps_of(session: OfflineSession, trial: Trial, seed: int) -> Iterator[TimedStep]:
    """Prompts are random tokens, and no two of them begin alike: nothing is found in a cache."""
    rng = random.Random(f"{trial.name} {seed}")
    requests = [
        WorkloadRequest(
            str(number),
            prompt_token_ids=tuple(rng.randrange(session.vocab_size) for _ in range(prompt)),
            output_len=answer,
        )
        for number, (prompt, answer) in enumerate(trial.lengths)
    ]
    run = session.run(requests, cache_salt=f"calibration {trial.name} {seed}")
    return (_timed(step) for step in run.steps if step.chunks)


def _timed(step: StepTiming) -> TimedStep:
    rows = passes(step.chunks, max(1, step.num_rounds))
    return TimedStep(tuple(StepFeatures.of(each) for each in rows), step.wall_s)


def _drift(turns: Sequence[Sequence[TimedStep]]) -> float:
    """How far whole turns through the same loads were from each other: the largest difference from
    their median, as a share. 0 where there was one turn."""
    count = min(map(len, turns))
    totals = [sum(step.seconds for step in turn[:count]) for turn in turns]
    middle = statistics.median(totals)
    return max(abs(total - middle) for total in totals) / middle
