"""Runs a calibration, in which the steps of scripted loads are timed for a minute and fitted."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.calibration.fit import TimedStep, fit
from octavo.calibration.loads import CalibrationLoad, EngineSize, calibration_loads
from octavo.calibration.store import CalibrationProfile, model_and_processor
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import passes
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, StepTiming
    from octavo.cost.measured_steps import MeasuredSteps

# Budgets of a thorough and of a quick calibration, about.
SECONDS, QUICK_SECONDS = 60.0, 15.0
_MOST_TURNS = 8  # of each load
# The usual drift of shared machines, where there was time for one turn only.
_UNKNOWN_DRIFT = 0.1
# Settings of the engine that a profile tells.
_SETTINGS = (
    *("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("prefix_caching", "batching", "chunked_prefill"),
)

Progress = Callable[[str, float], None]
"""Called with the name of the load, and the share of the time that has passed."""


def calibrate(
    session: OfflineSession,
    *,
    quick: bool = False,
    progress: Progress = lambda what, share: None,
) -> MeasuredSteps:
    """Time the steps of an engine, in turns through all loads for as long as there is time.

    Raises:
        BenchmarkError: the engine is too small for there to be enough steps.
    """
    pace = _Pace(QUICK_SECONDS if quick else SECONDS)
    planned = calibration_loads(size_of(session), quick=quick)
    turns: list[dict[str, list[TimedStep]]] = []
    while len(turns) < _MOST_TURNS and pace.has_room_for_another(len(turns)):
        turns.append({})
        for load in planned:
            if pace.has_room_for(load):
                progress(load.name, pace.share)
                turns[-1][load.name] = list(steps_of(session, load, seed=len(turns)))
                pace.note(load)
    steps = [step for turn in turns for some in turn.values() for step in some]
    return fit(steps, _drift(turns))


class _Pace:
    """Spends the budget of time: a load that would take more than is left, by the mean time of a
    token so far, is left out. So a large model runs fewer loads than a small one."""

    def __init__(self, budget: float):
        self._budget = budget
        self._begin = time.perf_counter()
        self._num_tokens = 0

    def has_room_for_another(self, num_turns: int) -> bool:
        """True if there is time for another turn, by the mean time of the turns so far."""
        return not num_turns or self._gone * (num_turns + 1) / num_turns <= self._budget

    @property
    def share(self) -> float:
        """Share of the time that has passed; 1 at most."""
        return min(1.0, self._gone / self._budget)

    def has_room_for(self, load: CalibrationLoad) -> bool:
        gone, tokens = self._gone, self._num_tokens
        return not tokens or gone + gone / tokens * load.num_tokens <= self._budget

    def note(self, load: CalibrationLoad) -> None:
        """Record that a load has been run."""
        self._num_tokens += load.num_tokens

    @property
    def _gone(self) -> float:
        return time.perf_counter() - self._begin


def profile_of(
    session: OfflineSession, steps: MeasuredSteps, measured_at: str
) -> CalibrationProfile:
    """Return the measured steps of an engine as a profile, with what it holds for."""
    info = session.info
    return CalibrationProfile(
        about(session), {name: info[name] for name in _SETTINGS}, steps, measured_at
    )


def about(session: OfflineSession) -> dict[str, Any]:
    """Return what the step times of an engine depend on, by which a profile is found."""
    info = session.info
    return {
        **model_and_processor(hub.resolve(session.args.model)),
        **{name: info[name] for name in ("device", "kernels", "isa", "dtype", "kv_dtype")},
        "threads": session.probe.num_threads,
        "activations": session.args.activations,
    }


def size_of(session: OfflineSession) -> EngineSize:
    config = session.loaded.config
    return EngineSize(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_model_len,
        config.cache.num_blocks // len(config.cache.windows) * config.cache.block_size,
    )


def steps_of(session: OfflineSession, load: CalibrationLoad, seed: object) -> Iterator[TimedStep]:
    """Run a load, and yield its timed steps.

    Prompts are random tokens: no two of them begin alike, except for the shared prefix of a load,
    and nothing else is found in a cache, as long as each ``seed`` is used once.
    """
    rng = random.Random(f"{load.name} {seed}")
    salt = f"calibration {load.name} {seed}"

    def request(name: object, begin: tuple[int, ...], prompt: int, answer: int) -> WorkloadRequest:
        own = [rng.randrange(session.vocab_size) for _ in range(prompt - len(begin))]
        return WorkloadRequest(str(name), prompt_token_ids=(*begin, *own), output_len=answer)

    begin: tuple[int, ...] = ()
    if load.shared:
        first = request("first", (), load.shared, 1)
        session.run([first], cache_salt=salt)
        begin = first.prompt_token_ids or ()
    run = session.run(
        [request(number, begin, *lengths) for number, lengths in enumerate(load.lengths)],
        cache_salt=salt,
    )
    shared = min(stats.num_cached_tokens for stats in run.requests)
    return (_timed(step, shared) for step in run.steps if step.chunks)


def _timed(step: StepTiming, shared: int) -> TimedStep:
    """``shared``: number of tokens that all prompts begin with."""
    num_decoding = sum(chunk.num_tokens == 1 for chunk in step.chunks)
    shared_keys = shared * max(0, num_decoding - 1)
    rows = passes(step.chunks, max(1, step.num_multi_steps), shared_keys)
    return TimedStep(tuple(StepFeatures.of(each) for each in rows), step.wall_s)


def _drift(turns: Sequence[Mapping[str, Sequence[TimedStep]]]) -> float:
    """Return the largest difference of a turn from the median, as a share, by the loads that all
    turns had."""
    if len(turns) == 1:
        return _UNKNOWN_DRIFT
    shared = set.intersection(*(set(turn) for turn in turns))
    totals = [sum(step.seconds for name in shared for step in turn[name]) for turn in turns]
    middle = statistics.median(totals)
    return max(abs(total - middle) for total in totals) / middle if middle else 0.0
