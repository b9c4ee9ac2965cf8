"""The rules by which drafts are accepted: what comes of them, against the exact distribution.

The model is a table over five tokens, and drafters are adversaries; nothing else of octavo is run.
All random numbers are counter-based, so that a test that passes once passes always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy import stats

from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.acceptance import SyntheticAcceptance, TypicalAcceptance, typical_threshold
from octavo.runtime.random import uniform
from octavo.runtime.verification import Acceptance, ExactAcceptance, SampledDraft

V = 5
Prefix = tuple[int, ...]
FAMILY_ALPHA = 1e-4
NUM_G_TESTS = 32  # an upper bound of how many this file makes


@cache
def p_after(prefix: Prefix) -> np.ndarray:
    """The model: a distribution with zeros, as top_k leaves it, after what came before."""
    rng = np.random.default_rng([7, *prefix])
    p = rng.dirichlet(np.full(V, 0.8))
    p[rng.permutation(V)[: len(prefix) % 3]] = 0.0
    return (p / p.sum()).astype(np.float32)


def inverse(p: np.ndarray, u: float) -> int:
    cdf = np.asarray(p, np.float64).cumsum()
    return int(cdf.searchsorted(u * cdf[-1], side="right"))


def new_request(seed: int = 0, **params) -> Request:
    params = {"max_tokens": 9, "temperature": 1.0, **params}
    return Request("r", [0], SamplingParams(**params), 0.0, seed=seed)


def sampled_draft(request: Request, draft: Draft, unsound=()) -> SampledDraft:
    """What a pass leaves of a draft: each row's distribution, and the token drawn from it."""
    known = tuple(request.output_token_ids)
    paths: list[Prefix] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else known), token_id))
    prefixes = [known, *paths]
    table = np.stack([p_after(prefix) for prefix in prefixes])
    numbers = [uniform(request.seed, 0, len(prefix)) for prefix in prefixes]
    token_ids = [inverse(p, u) for p, u in zip(table, numbers, strict=True)]
    return SampledDraft(request, draft, token_ids, unsound, table)


# ---- Drafters: each proposes what follows a prefix

Drafter = Callable[[Prefix, np.random.Generator, Request], Draft]


def drawn_chain(q_of: Callable[[np.ndarray], np.ndarray], length: int = 2) -> Drafter:
    """A chain whose tokens are drawn from what ``q_of`` makes of p."""

    def propose(prefix, rng, request) -> Draft:
        token_ids: list[int] = []
        for _ in range(length):
            token_ids.append(inverse(q_of(p_after((*prefix, *token_ids))), rng.random()))
        return Draft.chain(token_ids)

    return propose


def model_itself(prefix, rng, request) -> Draft:
    """Drawn from p with the very numbers that the request samples with, as draft models do it."""
    token_ids: list[int] = []
    for _ in range(3):
        at = (*prefix, *token_ids)
        token_ids.append(inverse(p_after(at), uniform(request.seed, 0, len(at))))
    return Draft.chain(token_ids)


def fixed(order: int) -> Drafter:
    """Not drawn: the token of a rank, and after it again."""

    def propose(prefix, rng, request) -> Draft:
        first = int(np.argsort(p_after(prefix))[order])
        return Draft.chain([first, int(np.argsort(p_after((*prefix, first)))[order])])

    return propose


def coupled(prefix, rng, request) -> Draft:
    """Chosen by the very number that the request samples with."""
    return Draft.chain([int(uniform(request.seed, 0, len(prefix) + i) * V) for i in range(2)])


def tree(prefix, rng, request) -> Draft:
    """The three likeliest, and two after each of the first two; nothing is drawn."""
    first = np.argsort(-p_after(prefix))[:3].tolist()
    token_ids, parents = list(first), [-1] * 3
    for index in range(2):
        second = np.argsort(-p_after((*prefix, first[index])))[1:3].tolist()
        token_ids += second
        parents += [index, index]
    return Draft(tuple(token_ids), tuple(parents))


def drawn_siblings(prefix, rng, request) -> Draft:
    """Three that are drawn without replacement, from the same for all; and one after the second."""
    q = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    token_ids: list[int] = []
    for _ in range(3):
        token_ids.append(inverse(q, rng.random()))
        q = q.copy()
        q[token_ids[-1]] = 0.0
    return Draft((*token_ids, int(rng.integers(V))), (-1, -1, -1, 1))


DRAFTERS: dict[str, Drafter] = {
    "q is p": drawn_chain(lambda p: p),
    "q is uniform": drawn_chain(np.ones_like, 3),
    "the model itself": model_itself,
    "the likeliest": fixed(-1),
    "the least likely": fixed(0),
    "the second": fixed(-2),
    "coupled": coupled,
    "a tree": tree,
    "siblings that are drawn": drawn_siblings,
}


def first_tokens(rule: Acceptance, propose: Drafter, seed: int, count: int = 2) -> Prefix:
    """What a request is answered, step after step."""
    request = new_request(seed)
    rng = np.random.default_rng(seed)  # the drafter's own
    while request.num_output_tokens < count:
        draft = propose(tuple(request.output_token_ids), rng, request)
        request.token_ids += rule.verify(sampled_draft(request, draft)).token_ids
    return tuple(request.output_token_ids[:count])


def pair_g_test(rule: Acceptance, propose: Drafter, num: int) -> tuple[float, float]:
    """p-value of the first two tokens, jointly; and how often an impossible pair came."""
    counts = np.zeros((V, V))
    for seed in range(num):
        counts[first_tokens(rule, propose, seed)] += 1
    p = np.stack([p_after((first,)) * p_after(())[first] for first in range(V)]).astype(np.float64)
    possible = p > 0
    expected, observed = p[possible] / p.sum() * num, counts[possible]
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    terms = np.where(observed > 0, observed * np.log(np.maximum(observed, 1) / expected), 0.0)
    return float(stats.chi2.sf(2 * terms.sum(), len(expected) - 1)), counts[~possible].sum()


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_exact_rule_keeps_the_distribution(name):
    p_value, impossible = pair_g_test(ExactAcceptance(), DRAFTERS[name], 1500)
    assert impossible == 0
    assert p_value > FAMILY_ALPHA / NUM_G_TESTS


def test_the_g_test_sees_a_rule_that_does_not():
    p_value, _ = pair_g_test(TypicalAcceptance(), DRAFTERS["the second"], 2000)
    assert p_value < FAMILY_ALPHA / NUM_G_TESTS


def test_a_model_that_drafts_for_itself_is_always_right():
    """As it draws with the request's own numbers; with others it would be as often as p has it."""
    for seed in range(200):
        draft = model_itself((), None, new_request(seed))
        assert ExactAcceptance().verify(sampled_draft(new_request(seed), draft)).path == [0, 1, 2]


@pytest.mark.parametrize("rule", [TypicalAcceptance(), SyntheticAcceptance([0.9, 0.5])])
def test_a_seed_and_a_draft_give_the_same_answer(rule):
    draft = tree((), np.random.default_rng(0), new_request())
    answers = [
        rule.verify(sampled_draft(new_request(seed), draft)) for seed in [*range(30), *range(30)]
    ]
    assert answers[:30] == answers[30:]
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


@pytest.mark.parametrize(
    "rule", [TypicalAcceptance(), SyntheticAcceptance([0.7, 0.7, 0.7]), ExactAcceptance()]
)
@pytest.mark.parametrize("name", ["a tree", "siblings that are drawn", "q is uniform"])
def test_the_last_token_is_none_that_was_drafted_there(rule, name):
    """So that the path of the tokens, which the engine counts, is that of the verdict."""
    for seed in range(100):
        request = new_request(seed)
        draft = DRAFTERS[name]((), np.random.default_rng(seed), request)
        verified = rule.verify(sampled_draft(request, draft))
        assert draft.path(verified.token_ids) == verified.path
        assert len(verified.token_ids) == len(verified.rows) == len(verified.path) + 1


@pytest.mark.parametrize(
    "rule", [TypicalAcceptance(), SyntheticAcceptance([1.0, 1.0]), ExactAcceptance()]
)
def test_a_walk_ends_before_a_row_that_is_unsound(rule):
    request = new_request()
    sampled = sampled_draft(request, Draft.chain([0]))
    first = sampled.token_ids[0]  # so that even the exact rule accepts it
    seeds = [
        s
        for s in range(200)
        if sampled_draft(new_request(s), Draft.chain([0])).token_ids[0] == first
    ]
    ends = 0
    for seed in seeds:
        verified = rule.verify(
            sampled_draft(new_request(seed), Draft.chain([first, 2]), unsound={1})
        )
        if verified.token_ids[0] == first:  # accepted; what follows it is not known
            assert verified == ([0], [first])
            ends += 1
    assert ends > 5


def test_greedy_requests_have_the_exact_rule():
    request = new_request(temperature=0.0)
    draft = Draft((1, 2, 3), (-1, -1, 1))
    for token_ids in ([1, 0, 0, 0], [2, 0, 3, 1], [4, 0, 0, 0]):
        plain = SampledDraft(request, draft, token_ids)
        assert TypicalAcceptance().verify(plain) == ExactAcceptance().verify(plain)


# ---- Typical acceptance


@pytest.mark.parametrize(
    ("p", "threshold"),
    [
        ([1.0, 0.0, 0.0, 0.0], 0.09),
        ([0.25, 0.25, 0.25, 0.25], 0.3 / 4),
        ([0.1] * 10, 0.03),
        ([0.5, 0.5, 0.0, 0.0], 0.09),
    ],
)
def test_the_threshold_falls_with_the_entropy(p, threshold):
    assert typical_threshold(np.array(p, np.float32)) == pytest.approx(threshold, rel=1e-6)


def test_typical_acceptance_is_of_all_that_is_above_the_threshold():
    table = np.array([[0.86, 0.08, 0.06, 0.0]] * 4, np.float32)  # the threshold is 0.09
    request = new_request()
    assert TypicalAcceptance().verify(
        SampledDraft(request, Draft.chain([0]), [3, 3], (), table)
    ).path == [0]
    assert (
        TypicalAcceptance().verify(SampledDraft(request, Draft.chain([1]), [3, 3], (), table)).path
        == []
    )
    assert TypicalAcceptance().verify(
        SampledDraft(request, Draft.chain([1]), [1, 3], (), table)
    ).path == [0]
    even = np.full((4, 4), 0.25, np.float32)
    longest = Draft((0, 1, 2), (-1, -1, 1))
    assert TypicalAcceptance().verify(SampledDraft(request, longest, [3, 3, 3, 3], (), even)) == (
        [0, 2, 3],
        [1, 2, 3],
    )


# ---- Synthetic acceptance


def test_rates_are_those_that_were_asked_for():
    rates, num = (0.9, 0.5, 0.0, 1.0), 4000
    rule = SyntheticAcceptance(rates)
    reached = np.zeros(5, int)
    for seed in range(num):
        request = new_request(seed % 50, max_tokens=200)
        request.token_ids += [1] * (seed // 50)
        reached[: len(rule.path(request, Draft.chain([0] * 6))) + 1] += 1
    for rate, (before, after) in zip(rates, zip(reached, reached[1:], strict=False), strict=False):
        if before:
            assert stats.binomtest(int(after), int(before), rate).pvalue > 1e-4
    assert reached[3] == reached[4] == 0


def test_of_siblings_the_first_has_the_chance():
    draft = Draft((1, 2, 3, 4), (-1, -1, 0, 1))
    assert SyntheticAcceptance([1.0, 1.0, 1.0]).path(new_request(), draft) == [0, 2]
    assert SyntheticAcceptance([1.0]).path(new_request(), draft) == [0]
    assert SyntheticAcceptance([]).path(new_request(), draft) == []


@pytest.mark.parametrize(("sampled", "expected"), [(3, 3), (2, 0), (0, 0), (1, 0)])
def test_what_was_refused_does_not_come_all_the_same(sampled, expected):
    draft = Draft((1, 2), (-1, -1))
    token_ids = [sampled, 0, 0]
    assert SyntheticAcceptance([0.0]).verify(
        SampledDraft(new_request(), draft, token_ids)
    ).token_ids == [expected]
    all_below = Draft((0, 1), (-1, -1))
    if sampled < 2:
        assert SyntheticAcceptance([0.0]).verify(
            SampledDraft(new_request(), all_below, token_ids)
        ).token_ids == [2]
