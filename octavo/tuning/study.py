"""Puts a load, an objective and simulated engines together: from candidates to a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.base.errors import ConfigError
from octavo.planner.slo import Slo
from octavo.sim.prompts import PromptSpec
from octavo.tuning.explain import TuningDecision
from octavo.tuning.live_confirmation import LiveRuns, OpenSession, measure, within
from octavo.tuning.objective import Objective
from octavo.tuning.outcome import LoadOutcome, load_outcome
from octavo.tuning.search import Progress, SearchResult, ablations, search
from octavo.tuning.simulated_engines import SimulatedEngines
from octavo.tuning.space import DEFAULTS, SPECULATION, CandidateSettings
from octavo.workload.requests import WorkloadRequest

_FEWEST_LIVE = 5  # requests


@dataclass(frozen=True, slots=True)
class TuningStudy:
    """A tuning run. ``prompts``: of the load, in the order of sending."""

    engines: SimulatedEngines
    prompts: Sequence[PromptSpec]
    objective: Objective
    slo: Slo
    _known: dict[tuple[CandidateSettings, int], LoadOutcome] = field(
        default_factory=dict, init=False
    )

    def judge(self, candidate: CandidateSettings, count: int) -> LoadOutcome:
        """Return the outcome of a candidate on the first requests, as the objective sends them."""
        key = candidate, count
        if key not in self._known:
            self._known[key] = self._judge(candidate, count)
        return self._known[key]

    def search(self, candidates: Sequence[CandidateSettings], progress: Progress) -> SearchResult:
        return search(candidates, self.judge, len(self.prompts), progress)

    def predicted(self, candidate: CandidateSettings, times: Sequence[float]) -> LoadOutcome:
        """Return the simulated outcome of a candidate on requests at given times, such as those of
        a live run."""
        return load_outcome([self.engines.run_of(candidate, self.prompts)(times)], self.slo)

    def run_live(
        self,
        best: LoadOutcome,
        candidates: Sequence[CandidateSettings],
        open_session: OpenSession,
        requests: Sequence[WorkloadRequest],
        *,
        seconds: float,
        turns: int,
        progress: Progress,
    ) -> LiveRuns | None:
        """Run candidates on real engines, the defaults first.

        The load is what the objective derives from ``best``, the best simulated outcome; a lower
        one, if no candidate keeps the limits and the objective has one. Each run gets the requests
        of the first ``seconds``: returns None if they are too few.
        """
        found = None
        for plan in self.objective.trials(best):
            times = within(plan, seconds)
            if len(times) < _FEWEST_LIVE:
                break
            sent = requests[: len(times)]
            runs = measure(
                candidates, open_session, sent, times, self.slo, turns=turns, progress=progress
            )
            predicted = {each: self.predicted(each, times) for each in candidates}
            found = LiveRuns(runs, predicted, times)
            if found.any_holds:
                break
        return found

    def decide(self, found: SearchResult, live: LiveRuns | None = None) -> TuningDecision:
        """Return the decision for the best settings: live, if they were run, else in simulation."""
        best = found.best.candidate if live is None else live.best
        count = len(self.prompts)
        simulated = best if self.engines.can_speculate else best.without(SPECULATION)
        return TuningDecision(
            self.slo,
            best,
            simulated,
            self.judge(simulated, count),
            self.judge(DEFAULTS, count),
            found.best,
            len(found.tried),
            tuple(ablations(simulated, self.judge, count)),
            {} if live is None else live.measured,
        )

    def _judge(self, candidate: CandidateSettings, count: int) -> LoadOutcome:
        try:
            run = self.engines.run_of(candidate, self.prompts)
        except ConfigError:
            if candidate == DEFAULTS:
                raise
            return _impossible(self.slo)  # its settings contradict each other
        return self.objective.judge(run, count)


def _impossible(slo: Slo) -> LoadOutcome:
    seconds_of = {limit.name: math.inf for limit in slo}
    return LoadOutcome(seconds_of, math.inf, next(iter(seconds_of)), 0.0, 0.0, 0.0, score=0.0)
