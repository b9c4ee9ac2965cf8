"""A search for the best settings with as few simulated requests as possible.

Successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification", AISTATS 2016):
all candidates are judged by a few requests, the better half by twice as many, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.tuning.outcome import LoadOutcome, first_best
from octavo.tuning.space import DEFAULTS, ENGINE_SETTINGS, CandidateSettings

CandidateJudge = Callable[[CandidateSettings, int], LoadOutcome]
"""Returns the outcome of a candidate on a number of requests; the same each time."""

Progress = Callable[[str, int, int], None]
"""Called with the current task, the work done, and the work in all."""

_FEWEST = 25  # requests by which a candidate may be dropped


@dataclass(frozen=True, slots=True)
class JudgedCandidate:
    """A candidate, and its outcome on a number of requests."""

    candidate: CandidateSettings
    num_requests: int
    outcome: LoadOutcome

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": self.candidate.settings,
            "num_requests": self.num_requests,
            **self.outcome.as_json(),
        }


@dataclass(frozen=True, slots=True)
class SettingAblation:
    """The outcome of the best candidate with one of its changes undone."""

    name: str
    value: Any
    without: LoadOutcome


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. ``finalists``: judged by all requests, without changes that have no
    effect, the best one first. ``tried``: all candidates, each by the most requests that it was
    judged by."""

    finalists: tuple[JudgedCandidate, ...]
    tried: tuple[JudgedCandidate, ...]

    @property
    def best(self) -> JudgedCandidate:
        """The defaults, unless others are noticeably better."""
        by_candidate = {each.candidate: each for each in self.finalists}
        outcomes = {DEFAULTS: by_candidate[DEFAULTS].outcome}
        outcomes |= {each.candidate: each.outcome for each in self.finalists}
        return by_candidate[first_best(outcomes, LoadOutcome.is_better_than)]

    @property
    def pareto(self) -> tuple[JudgedCandidate, ...]:
        """Candidates that were judged by all requests, and than which no other has more goodput and
        less strain."""
        most = max(each.num_requests for each in self.tried)
        full = [each for each in self.tried if each.num_requests == most]
        return tuple(pareto(full))


def search(
    candidates: Sequence[CandidateSettings],
    judge: CandidateJudge,
    num_requests: int,
    progress: Progress = lambda what, done, total: None,
) -> SearchResult:
    """Search the candidates, one of which is ``DEFAULTS``."""
    judged: dict[CandidateSettings, JudgedCandidate] = {}

    def judge_once(candidate: CandidateSettings, count: int) -> LoadOutcome:
        known = judged.get(candidate)
        if known is None or known.num_requests != count:
            known = judged[candidate] = JudgedCandidate(candidate, count, judge(candidate, count))
        return known.outcome

    best = _halving(candidates, judge_once, num_requests, progress)
    plain = dict.fromkeys(
        [DEFAULTS, *(simplest(candidate, judge_once, num_requests) for candidate in best)]
    )
    finalists = sorted((judged[each] for each in plain), key=_order)
    return SearchResult(tuple(finalists), tuple(sorted(judged.values(), key=_order)))


def _halving(
    candidates: Sequence[CandidateSettings],
    judge: CandidateJudge,
    num_requests: int,
    progress: Progress,
) -> list[CandidateSettings]:
    """Return the better half of the last candidates, the best first. The defaults are never
    dropped."""
    counts = _rungs(num_requests)
    left = list(candidates)
    for count in counts:
        outcomes = {}
        for number, candidate in enumerate(left):
            progress(f"{len(left)} settings, {count} requests", number, len(left))
            outcomes[candidate] = judge(candidate, count)
        left.sort(key=lambda each: outcomes[each].rank, reverse=True)
        left = left[: max(1, len(left) // 2)]
        if DEFAULTS not in left:
            left.append(DEFAULTS)
    return left


def _rungs(num_requests: int) -> list[int]:
    """Return numbers of requests, each twice the one before, up to all."""
    counts = [num_requests]
    while counts[0] >= 2 * _FEWEST:
        counts.insert(0, counts[0] // 2)
    return counts


def simplest(
    candidate: CandidateSettings, judge: CandidateJudge, num_requests: int
) -> CandidateSettings:
    """Return the candidate without the changes that have no effect, which may be all of them."""
    full = judge(candidate, num_requests)
    for name in sorted(candidate.settings, key=lambda name: name not in ENGINE_SETTINGS):
        without = candidate.without(name)
        if not full.is_better_than(judge(without, num_requests)):
            candidate = without
    return candidate


def ablations(
    candidate: CandidateSettings, judge: CandidateJudge, num_requests: int
) -> Iterator[SettingAblation]:
    """Yields the outcome of a candidate without each of its changes."""
    for name, value in candidate.changes:
        yield SettingAblation(name, value, judge(candidate.without(name), num_requests))


def pareto(tried: Iterable[JudgedCandidate]) -> Iterator[JudgedCandidate]:
    """Yields the candidates than which no other has more goodput and less strain, by growing
    strain."""
    most = -1.0
    for each in sorted(tried, key=lambda each: (each.outcome.strain, -each.outcome.goodput)):
        if each.outcome.goodput > most:
            most = each.outcome.goodput
            yield each


def _order(tried: JudgedCandidate) -> tuple[Any, ...]:
    """Sort key: more requests first, then the better outcome, then fewer changes."""
    holds, score, slack = tried.outcome.rank
    changes = tried.candidate.changes
    return -tried.num_requests, not holds, -score, -slack, len(changes), str(changes)
