from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tuning.outcome import LoadOutcome
from octavo.tuning.search import JudgedCandidate, ablations, pareto, search, simplest
from octavo.tuning.space import DEFAULTS, CandidateSettings

# What each change does to the score, of 100 without any.
WORTH = {"a": 20.0, "b": 30.0, "c": 1.0, "d": -40.0}


def candidate(names: str) -> CandidateSettings:
    return CandidateSettings(tuple((name, 1) for name in sorted(names)))


def outcome(score: float, strain: float = 0.5) -> LoadOutcome:
    return LoadOutcome({}, strain, "ttft_p99", 1.0, score, score, score)


class Judge:
    """Scores are the surer the more requests there are."""

    def __init__(self, noise: float = 0.0):
        self._noise = noise
        self.num_requests = 0

    def __call__(self, judged: CandidateSettings, count: int) -> LoadOutcome:
        self.num_requests += count
        rng = random.Random(f"{judged} {count}")
        score = 100.0 + sum(WORTH[name] for name in judged.settings)
        return outcome(score + rng.gauss(0, self._noise / count))


ALL = [candidate(names) for names in ("", *"abcd", "ab", "ac", "bc", "bd", "abc", "abcd")]


def test_the_best_is_found_without_what_brings_nothing():
    judge = Judge()
    found = search(ALL, judge, 200)
    assert found.best.candidate == candidate("ab")
    assert found.best.num_requests == 200
    assert {each.candidate for each in found.tried} >= set(ALL)
    assert judge.num_requests < 200 * len(ALL)


def test_all_finalists_are_judged_by_all_requests_the_defaults_among_them():
    found = search(ALL, Judge(), 200)
    assert {each.num_requests for each in found.finalists} == {200}
    assert DEFAULTS in {each.candidate for each in found.finalists}
    scores = [each.outcome.score for each in found.finalists]
    assert scores == sorted(scores, reverse=True)
    assert {each.num_requests for each in found.tried} >= {25, 50, 200}


def test_the_defaults_stay_where_nothing_is_noticeably_better():
    found = search([candidate(names) for names in ("", "c", "d", "cd")], Judge(), 100)
    assert found.best.candidate == DEFAULTS


def test_few_requests_are_one_round():
    found = search(ALL, Judge(), 30)
    assert {each.num_requests for each in found.tried} == {30}


@settings(max_examples=20)
@given(st.permutations(ALL))
def test_the_order_of_candidates_does_not_matter(order):
    assert search(order, Judge(), 100).best.candidate == candidate("ab")


def test_noise_of_few_requests_is_outlived():
    assert search(ALL, Judge(noise=200.0), 400).best.candidate == candidate("ab")


def test_progress_is_told():
    heard = []
    search(ALL, Judge(), 100, lambda what, done, total: heard.append((what, done, total)))
    assert heard[0] == ("11 settings, 25 requests", 0, 11)
    assert heard[-1][0].endswith("100 requests")


def test_changes_that_bring_little_each_are_not_dropped_together():
    small = {"a": 4.0, "b": 4.0, "c": 4.0}

    def judge(judged: CandidateSettings, count: int) -> LoadOutcome:
        return outcome(100.0 + sum(small[name] for name in judged.settings))

    left = simplest(candidate("abc"), judge, 10)
    assert len(left.changes) == 2
    assert not judge(candidate("abc"), 10).is_better_than(judge(left, 10))


def test_changes_of_the_engine_are_the_first_to_be_dropped():
    def judge(judged: CandidateSettings, count: int) -> LoadOutcome:  # either would do
        return outcome(120.0 if judged.changes else 100.0)

    both = DEFAULTS.having("kv_cache_dtype", "int8").having("itl_target_ms", 0.0)
    assert simplest(both, judge, 10).settings == {"itl_target_ms": 0.0}


def test_an_ablation_takes_one_change_back():
    found = {each.name: each.without.score for each in ablations(candidate("ab"), Judge(), 10)}
    assert found == {"a": 130.0, "b": 120.0}


tried = st.builds(
    lambda score, strain: JudgedCandidate(DEFAULTS, 1, outcome(score, strain)),
    st.integers(0, 6).map(float),
    st.integers(1, 6).map(float),
)


@given(st.lists(tried, max_size=12))
def test_on_the_front_nothing_is_better_in_both(some):
    front = list(pareto(some))
    places = {(each.outcome.strain, each.outcome.goodput) for each in front}
    assert len(places) == len(front)
    for each in some:
        strain, goodput = each.outcome.strain, each.outcome.goodput
        is_dominated = any(
            s <= strain and g >= goodput and (s, g) != (strain, goodput)
            for s, g in ((o.outcome.strain, o.outcome.goodput) for o in some)
        )
        assert is_dominated != ((strain, goodput) in places)
