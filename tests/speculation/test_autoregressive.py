"""Chains of a model that may say anything, or fail."""

from __future__ import annotations

import logging
import random

import pytest
from drafting_double import DraftingDouble

from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import create_mask
from octavo.speculation.autoregressive import AutoregressiveLimits, AutoregressiveProposer
from octavo.speculation.confidence import Confidence
from octavo.speculation.draft_kv import DraftKV


def counts_up(text: list[int]) -> tuple[int, float]:
    return (text[-1] + 1) % 97, 0.95


class Bench:
    """A proposer over a double, and requests with blocks of their own."""

    def __init__(self, says=counts_up, most=8, **limits):
        self.double = DraftingDouble(says, 64, 4, most)
        values = {
            "max_tokens": 4,
            "min_probability": 0.1,
            "vocab_size": 97,
            "follows_masks": True,
            "max_position": 1000,
            "max_step_tokens": 512,
        }
        self.proposer = AutoregressiveProposer(
            self.double.run, DraftKV(64, 4), AutoregressiveLimits(**{**values, **limits})
        )
        self._blocks = iter(range(64))

    def request(self, tokens, request_id="r", mask=None, **params) -> Request:
        values = {"temperature": 0.0, **params}
        request = Request(request_id, tokens, SamplingParams(**values), 0.0, mask=mask)
        request.eos_token_ids = (96,)
        request.block_ids = [next(self._blocks) for _ in range((len(tokens) + 20) // 4)]
        return request

    def drafts(self, *requests, room=8, batch_tokens=None) -> dict[str, list[int]]:
        openings = [DraftingRequest(request, room) for request in requests]
        found = self.proposer.propose(openings, batch_tokens or len(requests))
        assert self.double.faults == []
        return {request_id: list(draft.token_ids) for request_id, draft in found.items()}


@pytest.mark.parametrize("most", [1, 3, 8])
def test_many_requests_go_on_together(most):
    """Whether a call of the model brings one token or more."""
    bench = Bench(most=most)
    first, second = bench.request([1, 2, 3], "a"), bench.request([7] * 9, "b")
    assert bench.drafts(first, second) == {"a": [4, 5, 6, 7], "b": [8, 9, 10, 11]}
    assert all(batch.num_seqs == 2 for batch in bench.double.batches)
    assert len(bench.double.batches) == 1 + -(-3 // most)
    assert bench.proposer.seconds > 0


def test_a_chain_is_no_longer_than_its_room():
    bench = Bench()
    assert bench.drafts(bench.request([1, 2, 3]), room=2) == {"r": [4, 5]}
    assert bench.drafts(bench.request([1, 2, 3], "one"), room=1) == {"one": [4]}
    assert bench.proposer.max_tokens == 4


def test_a_chain_ends_where_it_is_not_likely_to_be_right():
    bench = Bench(lambda text: (text[-1] + 1, 0.9 if text[-1] < 5 else 0.01), min_probability=0.5)
    for _ in range(40):
        bench.proposer.confidence.learn(0.01, is_greedy=True, is_right=False)
    assert bench.drafts(bench.request([1, 2, 3])) == {"r": [4, 5]}
    # But the first token is verified, so that it is known whether that is still so.
    assert bench.drafts(bench.request([1, 2, 8], "other")) == {"other": [9]}
    # Those that are sampled have not been that wrong.
    sampled = bench.request([1, 2, 3], "sampled", temperature=1.0)
    assert len(bench.drafts(sampled)["sampled"]) == 4


def test_a_chain_ends_with_the_text():
    bench = Bench()
    assert bench.drafts(bench.request([94])) == {"r": [95, 96]}
    assert bench.drafts(bench.request([94], "on", ignore_eos=True)) == {"on": [95, 96, 0, 1]}


def test_ids_that_the_target_does_not_know_are_not_drafted():
    bench = Bench(vocab_size=50)
    assert bench.drafts(bench.request([48])) == {"r": [49]}
    assert bench.drafts(bench.request([49], "none")) == {}
    unknown = bench.request([1, 60, 3], "unknown")
    assert bench.drafts(unknown, bench.request([1], "known")) == {"known": [2, 3, 4, 5]}
    assert not bench.proposer.wants(unknown)


def test_nothing_is_drafted_beyond_the_positions_of_the_model():
    bench = Bench(max_position=5)
    assert bench.drafts(bench.request([1, 2, 3, 4])) == {"r": [5, 6]}
    full = bench.request([1, 2, 3, 4, 5], "full")
    assert bench.proposer.wants(full) and bench.drafts(full) == {"full": [6]}
    assert not bench.proposer.wants(bench.request([1, 2, 3, 4, 5, 6], "over"))


def test_a_long_prompt_is_caught_up_with_over_several_calls():
    bench = Bench()
    long, short = bench.request([5] * 150, "long"), bench.request([1, 2], "short")
    found = [bench.drafts(long, short) for _ in range(3)]
    assert [sorted(drafts) for drafts in found] == [["short"], ["short"], ["long", "short"]]
    most = max(sum(i.num_tokens for i in batch.items) for batch in bench.double.batches)
    assert most <= 64 + 16


def test_a_long_prompt_that_is_alone_takes_what_a_step_holds():
    bench = Bench(max_step_tokens=100)
    request = bench.request([5] * 150)
    assert bench.drafts(request) == {}
    assert bench.drafts(request) == {"r": [6, 7, 8, 9]}


def test_no_step_has_more_tokens_than_the_model_can_take():
    bench = Bench(max_step_tokens=20)
    requests = [bench.request([5] * 9, f"r{index}") for index in range(4)]
    seen = [sorted(bench.drafts(*requests, batch_tokens=9)) for _ in range(3)]
    assert seen[-1] == ["r0", "r1", "r2", "r3"]
    assert all(batch.num_tokens <= 20 for batch in bench.double.batches)


def test_damage_costs_a_request_its_drafts_and_others_nothing(caplog):
    bench = Bench()
    bench.double.breaks = lambda item: "NaN" if item.request.request_id == "bad" else None
    bad, good = bench.request([1, 2, 3], "bad"), bench.request([4, 5, 6], "good")
    with caplog.at_level(logging.WARNING, "octavo"):
        for _ in range(3):
            assert bench.proposer.wants(bad)
            assert "bad" not in bench.drafts(bad, good)
    assert not bench.proposer.wants(bad) and bench.proposer.wants(good)
    assert bench.drafts(good) == {"good": [7, 8, 9, 10]}
    assert caplog.text.count("bad gets no more drafts: NaN") == 1


def test_who_shares_blocks_with_damage_does_not_read_it():
    bench = Bench()
    good, bad = bench.request([1, 2, 3], "good"), bench.request([1, 2, 3], "bad")
    bad.block_ids = good.block_ids
    bench.drafts(good)
    bench.double.breaks = lambda item: "NaN" if item.request.request_id == "bad" else None
    assert bench.drafts(bad) == {}
    good.token_ids.append(4)
    assert bench.drafts(good) == {"good": [5, 6, 7, 8]}


def test_a_model_that_raises_raises_nothing_here(caplog):
    bench = Bench()

    def fall(item):
        raise MemoryError("no room")

    bench.double.breaks = fall
    requests = [bench.request([1, 2, 3], "a"), bench.request([4, 5, 6], "b")]
    for _ in range(3):
        assert bench.drafts(*requests) == {}
    assert not any(map(bench.proposer.wants, requests))
    assert caplog.text.count("gets no more drafts: MemoryError: no room") == 1
    # Who comes later may have more luck.
    bench.double.breaks = lambda item: None
    assert bench.drafts(bench.request([7], "c")) == {"c": [8, 9, 10, 11]}


def test_now_and_then_a_failure_is_nothing():
    bench = Bench()
    request = bench.request([1, 2, 3])
    for turn in range(12):
        bench.double.breaks = lambda item, turn=turn: "NaN" if turn % 3 else None
        assert bench.drafts(request) == ({} if turn % 3 else {"r": [4, 5, 6, 7]})
    assert bench.proposer.wants(request)


def test_the_model_samples_as_the_request_does():
    """And sees what the mask of the request allows after each drafted token."""
    seen = []
    bench = Bench(most=1)
    bench.double.breaks = lambda item: seen.append(
        (item.request.params, item.request.seed, item.request.bitmask())
    )
    words = [[4, 5]]
    params = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5}
    mask = create_mask(SamplingParams(bad_words=["x"]), 97, (), words)
    request = bench.request([1, 2, 3], mask=mask, **params, logprobs=5, prompt_logprobs=2)
    request.seed = 11
    bench.drafts(request)
    assert {(p.temperature, p.top_p, p.repetition_penalty) for p, _, _ in seen} == {(0.7, 0.9, 1.2)}
    assert {(p.logprobs, p.prompt_logprobs, seed) for p, seed, _ in seen} == {(0, None, 11)}
    allows_five = [bits is None or bool(bits[0] >> 5 & 1) for _, _, bits in seen]
    assert allows_five == [True, False, True, True]  # not after 4
    assert mask.num_tokens == 0  # the request's own has not moved


def test_masks_of_another_vocabulary_are_not_followed():
    bench = Bench(follows_masks=False)
    mask = create_mask(SamplingParams(allowed_token_ids=[1]), 97)
    bench.drafts(bench.request([1, 2, 3], mask=mask))
    assert all(i.request.bitmask() is None for b in bench.double.batches for i in b.items)


def test_biases_of_unknown_ids_are_left_out():
    bench = Bench(vocab_size=50)
    bench.drafts(bench.request([1], logit_bias={3: 1.0, 70: 2.0}))
    assert bench.double.batches[0].items[0].request.params.logit_bias == {3: 1.0}


def test_who_has_ended_is_forgotten_by_the_model_too():
    bench = Bench()
    gone, stays = bench.request([1, 2, 3], "gone"), bench.request([4, 5, 6], "stays")
    bench.drafts(gone, stays)
    bench.proposer.forget(gone)
    bench.drafts(stays)
    first, *later = [batch.finished_ids for batch in bench.double.batches[-2:]]
    assert first == ("gone",) and not any(later)


def test_what_was_verified_is_learned():
    bench = Bench()
    request = bench.request([1, 2, 3])
    before = bench.proposer.confidence.chance(0.95, is_greedy=True)
    for _ in range(20):
        bench.drafts(request)
        bench.proposer.observe(request, Draft.chain((4, 5, 6, 7)), 0)
    assert bench.proposer.confidence.chance(0.95, is_greedy=True) < 0.2 < before
    assert bench.proposer.confidence.chance(0.95, is_greedy=False) == before
    bench.proposer.forget(request)
    bench.proposer.observe(request, Draft.chain((4,)), 1)  # it has ended with its last step


def test_confidence_comes_near_the_truth_and_follows_it():
    confidence, rng = Confidence(), random.Random(1)
    assert confidence.chance(0.3, is_greedy=True) > 0.8  # nothing was tried yet
    for rate in (0.4, 0.9):
        for _ in range(1500):
            confidence.learn(0.3, is_greedy=True, is_right=rng.random() < rate)
        assert confidence.chance(0.3, is_greedy=True) == pytest.approx(rate, abs=0.08)
    for probability in (0.0, 1e-30, 0.5, 1.0):
        assert 0 < confidence.chance(probability, is_greedy=True) <= 1
