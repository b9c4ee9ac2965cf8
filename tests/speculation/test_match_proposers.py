"""N-gram and suffix candidates: against what is found by going through all of a text."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.drafting import DraftingRequest
from octavo.core.request import FinishReason, Request, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.match_rates import MatchRates
from octavo.speculation.ngram import NgramProposer, spread
from octavo.speculation.suffix import SuffixProposer

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def make_request(prompt, output=(), request_id="r", salt="", **params):
    request = Request(
        request_id, prompt, SamplingParams(**params), arrival_time=0.0, cache_salt=salt
    )
    request.token_ids += output
    return request


def finish(request, reason=FinishReason.STOP):
    request.status, request.finish_reason = RequestStatus.FINISHED, reason


def answered(proposer, tokens, salt="", request_id="past", **params):
    """A request that was followed, and ended."""
    request = make_request(tokens[:1], tokens[1:], request_id, salt, **params)
    proposer.find_candidate(request, 1)
    finish(request)
    proposer.forget(request)


# -- candidates ----------------------------------------------------------------------------------


def test_a_candidate_ends_where_it_is_not_likely():
    candidate = DraftCandidate((1, 2, 3), (0.5, 0.5, 1.0))
    assert candidate.expected_tokens == 1.0
    assert candidate.while_likely(0.3) == candidate.first(1) == DraftCandidate((1,), (0.5,))
    assert candidate.while_likely(0.25) == candidate.first(9) == candidate
    assert candidate.while_likely(0.6) is None
    assert candidate.draft().parents == (-1, 0, 1)


def test_rates_are_those_of_the_request_then_those_of_all():
    general = MatchRates()
    one, other = MatchRates(general), MatchRates(general)
    assert one.rate(1) < one.rate(5) < one.rate(32) == one.rate(500) < 1
    before = other.rate(3)
    for _ in range(200):
        one.count(3, False)
    assert one.rate(3) < 0.01 and other.rate(3) < before / 4
    for _ in range(2000):
        one.count(3, True)
    assert one.rate(3) > 0.95
    assert one.rate(4) == MatchRates().rate(4)


# -- n-gram --------------------------------------------------------------------------------------


def looked_up(tokens, least, most, count):
    """The longest run of last tokens that was there before, the place with the most context."""
    for length in range(most, least - 1, -1):
        ends = [
            end
            for end in range(length, len(tokens))
            if tokens[end - length : end] == tokens[-length:]
        ]
        if ends:

            def context(end):
                return next(
                    n for n in range(end + 1) if n == end or tokens[end - 1 - n] != tokens[-1 - n]
                )

            end = max(ends[-16:], key=lambda end: (min(32, context(end)), end))
            text = list(tokens)
            for _ in range(count):
                text.append(text[end + len(text) - len(tokens)])
            return tuple(text[len(tokens) :])
    return None


@given(texts, texts, st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(1, 5)))
def test_ngrams_are_those_of_a_search(prompt, output, least, more, pieces):
    proposer = NgramProposer(least, least + more, 6)
    request = make_request(prompt)
    while True:
        candidate = proposer.find_candidate(request, 6)
        expected = looked_up(request.token_ids, least, least + more, 6)
        assert (candidate and candidate.token_ids) == expected
        if not output:
            return
        count = pieces.pop() if pieces else 1
        request.token_ids += output[:count]
        output = output[count:]


def test_a_wide_range_has_a_few_lengths_of_it():
    assert spread(2, 5) == (2, 3, 4, 5)
    lengths = spread(1, 1024)
    assert len(lengths) <= 8 and (lengths[0], lengths[-1]) == (1, 1024)
    proposer = NgramProposer(1, 1024)
    assert proposer.find_candidate(make_request([*range(100), *range(60)]), 3).token_ids == (
        60,
        61,
        62,
    )


def test_samples_of_a_prompt_share_its_index():
    proposer = NgramProposer()
    prompt = [1, 2, 3, 4, 1, 2]
    requests = [make_request(prompt, [3], str(i)) for i in range(4)]
    for request in requests:
        assert proposer.find_candidate(request, 2).token_ids == (4, 1)
    assert len(proposer._prompts) == 1
    for request in requests:
        proposer.forget(request)
    assert len(proposer._prompts) == 0 and not proposer._tracked


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_what_is_right_is_learned_whether_it_is_drafted_or_not(make):
    proposer = make()
    right, wrong = make_request([1, 2, 3, 4] * 3), make_request([1, 2, 3, 4] * 3, request_id="w")
    for step in range(60):
        right.token_ids.append(1 + step % 4)
        candidate = proposer.find_candidate(right, 1)
    assert candidate.probabilities[0] > 0.8
    for step in range(60):
        wrong.token_ids += [9 + step, 1, 2]
        unsure = proposer.find_candidate(wrong, 1)
    assert unsure is None or unsure.probabilities[0] < 0.2
    assert not proposer.propose([DraftingRequest(wrong, 4)], 1)
    assert len(proposer.propose([DraftingRequest(right, 3)], 1)["r"]) == 3


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_who_has_nothing_to_go_by_is_left_alone_until_he_has(make):
    proposer = make()
    request = make_request([1, 2, 3])
    assert proposer.wants(request)
    request.token_ids += range(10, 20)
    assert not proposer.wants(request)
    request.token_ids += [1, 2]
    assert proposer.wants(request)


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_a_request_begins_again_after_it_was_forgotten(make):
    proposer = make()
    request = make_request([1, 2, 3, 1, 2])
    first = proposer.find_candidate(request, 2)
    proposer.forget(request)  # preempted
    assert not proposer._tracked
    assert proposer.find_candidate(request, 2) == first
    request.token_ids += [3, 1]
    assert proposer.find_candidate(request, 2).token_ids == (2, 3)
    draft = proposer.propose([DraftingRequest(request, 2)], 1)["r"]
    finish(request)
    proposer.forget(request)
    proposer.observe(request, draft, 0)  # of one that has ended
    assert not proposer._tracked


# -- suffix --------------------------------------------------------------------------------------


def counted(text, context, most):
    """What followed the most likely, of the continuations of each length of match, by counting."""
    best, best_sum = None, 0.0
    for matched in range(min(8, len(context)), 0, -1):
        tokens, product, total = [], 1.0, 0.0
        while len(tokens) < min(most, matched):
            run = context[-matched:] + tokens
            extended = text + tokens
            ends = [
                end
                for end in range(matched, len(text))
                if extended[end - matched : end + len(tokens)] == run
            ]
            if not ends:
                break
            longest = sorted(ends, key=lambda end: (-agreement(text, context, end), -end))
            follow = Counter(extended[end + len(tokens)] for end in longest)
            token, count = follow.most_common(1)[0]
            rate = MatchRates().rate(matched + len(tokens))
            product *= (count + 4 * rate) / (len(ends) + 4)
            if token == -1 or (tokens and product < 0.1):
                break
            tokens.append(token)
            total += product
        if total > best_sum:
            best, best_sum = tuple(tokens), total
    return best, best_sum


def agreement(text, context, end):
    return next(
        n for n in range(9) if n in (8, end, len(context)) or text[end - 1 - n] != context[-1 - n]
    )


@given(texts.filter(lambda text: len(text) <= 33))
def test_a_request_alone_is_counted_as_by_hand(tokens):
    candidate = SuffixProposer(8, num_speculative_tokens=6).find_candidate(make_request(tokens), 6)
    expected, total = counted(tokens, tokens, 6)
    assert (candidate and candidate.token_ids) == expected
    assert candidate is None or candidate.expected_tokens == pytest.approx(total)


@given(st.lists(texts, max_size=2).filter(lambda ts: sum(map(len, ts)) <= 28), texts)
def test_past_answers_are_counted_too(answers, tokens):
    tokens = tokens[:30]
    proposer = SuffixProposer(8, num_speculative_tokens=6)
    for answer in answers:
        proposer.past_answers.add("", answer)
    past = [token for answer in answers for token in [*answer, -1]]
    own, other = counted(tokens, tokens, 6), counted(past, tokens, 6)
    candidate = proposer.find_candidate(make_request(tokens), 6)
    assert (candidate and candidate.token_ids) == (other if other[1] > own[1] + 1e-12 else own)[0]


def test_an_answer_is_remembered_for_its_tenant():
    proposer = SuffixProposer()
    answered(proposer, [5, 6, 7, 8, 9], "a")
    asked = [make_request([0, 5, 6, 7], request_id=salt or "x", salt=salt) for salt in ("a", "")]
    assert proposer.find_candidate(asked[0], 2).token_ids == (8, 9)
    assert proposer.find_candidate(asked[1], 2) is None


def test_what_was_cut_off_or_turned_off_is_not_remembered():
    proposer = SuffixProposer()
    answered(proposer, [5, 6, 7], speculative={"enabled": False})
    for reason in (FinishReason.ABORT, FinishReason.ERROR, None):
        request = make_request([5, 6], [7, 8])
        if reason is not None:
            finish(request, reason)
        proposer.forget(request)
    assert proposer.past_answers.num_answers == 0


def test_a_draft_is_as_long_as_its_match_allows():
    def length(factor, matched):
        proposer = SuffixProposer(factor=factor)
        tokens = [*range(10, 40)]
        request = make_request([*tokens, 99, *tokens[5 - matched : 5]])
        candidate = proposer.find_candidate(request, 64)
        return len(candidate.token_ids) if candidate else 0

    assert [length(1.0, n) for n in (1, 3, 5)] == [1, 3, 5]
    assert [length(2.0, n) for n in (1, 3, 5)] == [2, 6, 7]
    assert [length(0.5, n) for n in (1, 3)] == [0, 1]
