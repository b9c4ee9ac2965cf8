"""Explains tuned settings, by what binds, the effect of each setting, and the results
of live runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from octavo.planner.slo import Slo
from octavo.tuning.outcome import LoadOutcome
from octavo.tuning.search import JudgedCandidate, SettingAblation
from octavo.tuning.space import DEFAULTS, CandidateSettings, said

_CHANGES_ANSWERS = {"kv_cache_dtype", "model"}


@dataclass(frozen=True, slots=True)
class TuningDecision:
    """The settings that were chosen, and the evidence for them.

    Args:
        simulated: the best settings as far as they were simulated: without speculative
            decoding, unless acceptance rates were given.
        predicted, defaults: outcomes of these and of the defaults, by the same requests.
        favourite: the best candidate in simulation.
        measured: live outcomes, that of the defaults among them; empty where nothing was run.
    """

    slo: Slo
    best: CandidateSettings
    simulated: CandidateSettings
    predicted: LoadOutcome
    defaults: LoadOutcome
    favourite: JudgedCandidate
    num_tried: int
    ablations: tuple[SettingAblation, ...] = ()
    measured: Mapping[CandidateSettings, LoadOutcome] = field(default_factory=dict)

    @property
    def outcome(self) -> LoadOutcome:
        """Outcome of the chosen settings: measured, if it was."""
        return self.measured.get(self.best, self.predicted)


def why(decision: TuningDecision) -> str:
    """Return a short paragraph."""
    return " ".join(_sentences(decision))


def _sentences(decision: TuningDecision) -> Iterator[str]:
    yield _choice(decision)
    yield _binding(decision.slo, decision.predicted)
    for each in decision.ablations:
        yield f"Without {said(each.name, each.value)}, it would be {_told(each.without)}."
    if decision.best.settings.keys() & _CHANGES_ANSWERS:
        yield "Answers change a little with that, which was not judged."
    yield from _live(decision)


def _choice(decision: TuningDecision) -> str:
    best, predicted = decision.simulated, decision.predicted
    is_favourite = best == decision.favourite.candidate
    rank = f"best of {decision.num_tried} settings, " if is_favourite else ""
    if best == DEFAULTS:
        return f"The defaults: {rank}simulated with {_told(predicted)}."
    return (
        f"{best}: {rank}simulated with {_told(predicted)}; the defaults with "
        f"{_told(decision.defaults)}."
    )


def _live(decision: TuningDecision) -> Iterator[str]:
    own, usual = decision.measured.get(decision.best), decision.measured.get(DEFAULTS)
    if own is None or usual is None:
        yield "Nothing of this was measured live."
    elif decision.best == DEFAULTS:
        yield f"Live, no other was better in every turn: {_told_live(own)}."
    elif decision.best != decision.simulated:
        without = decision.measured[decision.simulated]
        yield f"Live, with speculation, {_told_live(own)}; without, {_told_live(without)}."
    else:
        yield f"Live, {_told_live(own)}; the defaults, {_told_live(usual)}."
    favourite = decision.favourite
    if favourite.candidate != decision.simulated and favourite.candidate in decision.measured:
        yield (
            f"{favourite.candidate} was best in simulation, with {_told(favourite.outcome)}, and "
            f"live, with {_told_live(decision.measured[favourite.candidate])}, was not."
        )
    if own is not None and not own.holds:
        yield _binding(decision.slo, own)


def _told(outcome: LoadOutcome) -> str:
    """Describe an outcome: ``up to 3.1 requests/s within the limits, 93% of the tightest limit
    used``."""
    if outcome.holds and outcome.rate is not None:
        served = f"up to {outcome.rate:.3g} requests/s within the limits"
    else:
        served = f"{outcome.attainment:.0%} of the requests within the limits"
    return f"{served}, {_strain(outcome)}"


def _told_live(outcome: LoadOutcome) -> str:
    came = "" if outcome.rate is None else f" of {outcome.rate:.3g} requests/s"
    return f"{outcome.attainment:.0%}{came} within the limits, {_strain(outcome)}"


def _strain(outcome: LoadOutcome) -> str:
    if outcome.strain == math.inf:
        return "with requests that failed, or a queue that grew"
    return f"{outcome.strain:.0%} of the tightest limit used"


def _binding(slo: Slo, outcome: LoadOutcome) -> str:
    limit = next((each for each in slo if each.name == outcome.binding), None)
    if limit is None:
        return f"What binds is {outcome.binding}."
    reached = outcome.seconds_of[limit.name]
    if reached == math.inf:
        return f"What binds is {limit.name}: requests failed."
    verdict = "" if outcome.holds else ", which does not hold"
    return (
        f"What binds is {limit.name}: {reached * 1e3:.3g} of {limit.seconds * 1e3:g} ms{verdict}."
    )
