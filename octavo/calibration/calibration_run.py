"""One minute on the machine itself: an engine's steps, timed and put into a `Profile`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.calibration.fit import TimedStep, fit
from octavo.calibration.store import Profile, model_and_processor
from octavo.calibration.trials import CalibrationLoad, Size, trials
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import passes
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, StepTiming
    from octavo.cost.measured_steps import MeasuredSteps

# What a quick and a thorough calibration may take, about.
SECONDS, QUICK_SECONDS = 60.0, 15.0
_MOST_TURNS = 8  # of each load
# Where a model is so large that there was time for one turn only: what shared machines drift by.
_UNKNOWN_DRIFT = 0.1
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
    pace = _Pace(QUICK_SECONDS if quick else SECONDS)
    planned = trials(size_of(session), quick=quick)
    turns: list[dict[str, list[TimedStep]]] = []
    while len(turns) < _MOST_TURNS and pace.has_room_for_another(len(turns)):
        turns.append({})
        for trial in planned:
            if pace.has_room_for(trial):
                progress(trial.name, pace.share)
                turns[-1][trial.name] = list(steps_of(session, trial, seed=len(turns)))
                pace.note(trial)
    steps = [step for turn in turns for some in turn.values() for step in some]
    return fit(steps, _drift(turns))


class _Pace:
    """How the time is spent: a load that would take more than is left is left out, by what a token
    has taken so far. So a large model is asked for less than a small one."""

    def __init__(self, budget: float):
        self._budget = budget
        self._begin = time.perf_counter()
        self._num_tokens = 0

    def has_room_for_another(self, num_turns: int) -> bool:
        """Turn, by what so many have taken."""
        return not num_turns or self._gone * (num_turns + 1) / num_turns <= self._budget

    @property
    def share(self) -> float:
        """Of the time, that has gone; 1 at most."""
        return min(1.0, self._gone / self._budget)

    def has_room_for(self, trial: CalibrationLoad) -> bool:
        gone, tokens = self._gone, self._num_tokens
        return not tokens or gone + gone / tokens * trial.num_tokens <= self._budget

    def note(self, trial: CalibrationLoad) -> None:
        """It has been run."""
        self._num_tokens += trial.num_tokens

    @property
    def _gone(self) -> float:
        return time.perf_counter() - self._begin


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


def size_of(session: OfflineSession) -> Size:
    config = session.loaded.config
    return Size(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_model_len,
        config.cache.num_blocks // len(config.cache.windows) * config.cache.block_size,
    )


def steps_of(session: OfflineSession, trial: CalibrationLoad, seed: object) -> Iterator[TimedStep]:
    """Run a load, and time its steps.

    Prompts are random tokens: no two of them begin alike, but for what a trial has them share,
    and nothing else is found in a cache, as long as ``seed`` is another each time.
    """
    rng = random.Random(f"{trial.name} {seed}")
    salt = f"calibration {trial.name} {seed}"

    def request(name: object, begin: tuple[int, ...], prompt: int, answer: int) -> WorkloadRequest:
        own = [rng.randrange(session.vocab_size) for _ in range(prompt - len(begin))]
        return WorkloadRequest(str(name), prompt_token_ids=(*begin, *own), output_len=answer)

    begin: tuple[int, ...] = ()
    if trial.shared:
        first = request("first", (), trial.shared, 1)
        session.run([first], cache_salt=salt)
        begin = first.prompt_token_ids or ()
    run = session.run(
        [request(number, begin, *lengths) for number, lengths in enumerate(trial.lengths)],
        cache_salt=salt,
    )
    shared = min(stats.num_cached_tokens for stats in run.requests)
    return (_timed(step, shared) for step in run.steps if step.chunks)


def _timed(step: StepTiming, shared: int) -> TimedStep:
    """``shared``: tokens that are the same, and in the same place, for all."""
    num_decoding = sum(chunk.num_tokens == 1 for chunk in step.chunks)
    shared_keys = shared * max(0, num_decoding - 1)
    rows = passes(step.chunks, max(1, step.num_multi_steps), shared_keys)
    return TimedStep(tuple(StepFeatures.of(each) for each in rows), step.wall_s)


def _drift(turns: Sequence[Mapping[str, Sequence[TimedStep]]]) -> float:
    """How far whole turns were from each other, in the loads that all of them had: the largest
    difference from their median, as a share."""
    if len(turns) == 1:
        return _UNKNOWN_DRIFT
    shared = set.intersection(*(set(turn) for turn in turns))
    totals = [sum(step.seconds for name in shared for step in turn[name]) for turn in turns]
    middle = statistics.median(totals)
    return max(abs(total - middle) for total in totals) / middle if middle else 0.0
