"""Steps of the scheduler: all that was asked is in them, and no more than there is room for."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.page.batching_traces import ARRIVALS, BATCHINGS, LENGTHS, SLOTS, batching_traces


@pytest.fixture(scope="module")
def cases():
    found = batching_traces()["cases"]
    return {(case["lengths"], case["slots"], case["arrivals"]): case for case in found}


def runs(cases):
    for case in cases.values():
        for batching, run in case["runs"].items():
            yield case, batching, run


def test_there_is_a_run_of_each_kind(cases):
    assert len(cases) == len(LENGTHS) * len(SLOTS) * len(ARRIVALS)
    assert all(tuple(case["runs"]) == BATCHINGS for case in cases.values())


def test_each_token_is_computed_once(cases):
    for case, _, run in runs(cases):
        prompts, decoded = Counter(), Counter()
        for _, _, chunks, decoding, _, preempted, _ in run["steps"]:
            assert preempted == []  # there is room for all, so that nothing is computed again
            for number, num_tokens in chunks:
                prompts[number] += num_tokens
            decoded.update(decoding)
        for number, (_, prompt, answer) in enumerate(case["requests"]):
            assert prompts[number] == prompt
            assert decoded[number] == answer - 1  # the first comes with the end of its prompt


def test_steps_follow_each_other_and_requests_their_arrival(cases):
    for case, _, run in runs(cases):
        now = 0.0
        for begun, ended, chunks, decoding, *_ in run["steps"]:
            assert now <= begun < ended
            now = ended
            assert 1 <= len(chunks) + len(decoding) <= case["slots"]
            assert all(case["requests"][number][0] <= begun for number, _ in chunks)
        assert run["seconds"] == now


def test_a_static_batch_lets_nobody_in_while_it_decodes(cases):
    for _, batching, run in runs(cases):
        mixed = [step for step in run["steps"] if step[2] and step[3]]
        assert not mixed or batching == "continuous"
    joined = cases["mixed", 4, "at once"]["runs"]["continuous"]["steps"]
    assert any(chunks and decoding for _, _, chunks, decoding, *_ in joined)


def test_what_continuous_batching_brings_depends_on_the_requests(cases):
    alike = cases["alike", 4, "at once"]["runs"]
    assert alike["static"] == alike["continuous"]
    for case in cases.values():
        static, continuous = case["runs"]["static"], case["runs"]["continuous"]
        assert continuous["seconds"] <= static["seconds"]
        assert sum(continuous["ttft"]) <= sum(static["ttft"])
