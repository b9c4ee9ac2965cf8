"""Confirms the best candidates on real engines of this machine. They take turns, so that a
disturbance of the machine affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.calibration.live_run import run_live
from octavo.measure.request_record import RequestRecord
from octavo.planner.slo import Slo
from octavo.tuning.outcome import LoadOutcome, first_best, load_outcome
from octavo.tuning.search import Progress
from octavo.tuning.space import CandidateSettings

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession
    from octavo.workload.requests import WorkloadRequest

OpenSession = Callable[[CandidateSettings], "OfflineSession"]

_WARMUP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class LiveMeasurement:
    """Outcome of the live runs of a candidate: of all of them together, and of each."""

    total: LoadOutcome
    turns: tuple[LoadOutcome, ...]

    def beats(self, other: LiveMeasurement) -> bool:
        """True if it is noticeably better, and was no worse in any turn: a disturbance seldom
        repeats."""
        pairs = zip(self.turns, other.turns, strict=True)
        return self.total.is_better_than(other.total) and all(
            own.rank >= theirs.rank for own, theirs in pairs
        )


def measure(
    candidates: Sequence[CandidateSettings],
    open_session: OpenSession,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    slo: Slo,
    *,
    turns: int,
    progress: Progress = lambda what, done, total: None,
) -> dict[CandidateSettings, LiveMeasurement]:
    """Run each candidate on the same requests: forth, back, and forth through the candidates.

    Each run has an engine of its own, made for it and closed after it.
    """
    runs: dict[CandidateSettings, list[list[RequestRecord]]] = {each: [] for each in candidates}
    for turn in range(turns):
        for number, candidate in enumerate(candidates[:: -1 if turn % 2 else 1]):
            done = turn * len(candidates) + number
            progress(f"live: {candidate}", done, turns * len(candidates))
            with open_session(candidate) as session:
                session.run(requests[:_WARMUP_REQUESTS], cache_salt="to be warm")
                runs[candidate].append(run_live(session, requests, times, cache_salt="counts"))
    rate = len(times) / times[-1] if times[-1] else None
    return {
        candidate: LiveMeasurement(
            load_outcome(own, slo, rate), tuple(load_outcome([run], slo, rate) for run in own)
        )
        for candidate, own in runs.items()
    }


def within(times: Sequence[float], seconds: float) -> Sequence[float]:
    """Return the times within the first ``seconds``."""
    return [time for time in times if time <= seconds]


@dataclass(frozen=True, slots=True)
class LiveRuns:
    """Outcomes of candidates live, and in simulation by the same requests.

    Args:
        runs, predicted: the defaults first, then the others in the order of the search.
        times: when requests were sent.
    """

    runs: Mapping[CandidateSettings, LiveMeasurement]
    predicted: Mapping[CandidateSettings, LoadOutcome]
    times: Sequence[float]

    @property
    def measured(self) -> dict[CandidateSettings, LoadOutcome]:
        return {candidate: each.total for candidate, each in self.runs.items()}

    @property
    def best(self) -> CandidateSettings:
        return first_best(self.runs, LiveMeasurement.beats)

    @property
    def any_holds(self) -> bool:
        return any(each.total.holds for each in self.runs.values())

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "settings": candidate.settings,
                "num_requests": len(self.times),
                "predicted": self.predicted[candidate].as_json(),
                "measured": each.total.as_json(),
                "turns": [turn.as_json() for turn in each.turns],
            }
            for candidate, each in self.runs.items()
        ]
