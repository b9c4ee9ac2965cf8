"""Traces of layouts: steps of the scheduler, with what stages and ranks do of each."""

from __future__ import annotations

import pytest

from octavo.page.layout_traces import LAYOUTS, LOADS, layout_traces


@pytest.fixture(scope="module")
def cases():
    return layout_traces()["cases"]


def test_there_is_a_run_of_each_kind(cases):
    assert [(case["layout"], case["load"]) for case in cases] == [
        (layout, load) for layout in LAYOUTS for load in LOADS
    ]
    assert all(case["ranks"] == int(case["layout"].split()[1]) for case in cases)


def test_each_token_is_computed_once(cases):
    for case in cases:
        count, prompt, answer = case["requests"]
        assert sum(step[2] for step in case["steps"]) == count * prompt
        assert sum(step[3] for step in case["steps"]) == count * (answer - 1)


def test_stages_compute_one_step_at_a_time_in_their_order(cases):
    pipelines = [case for case in cases if case["kind"] == "pipeline"]
    assert pipelines
    for case in pipelines:
        free = [0.0] * case["ranks"]
        for begun, ended, *_, stages in case["steps"]:
            assert (stages[0][0], stages[-1][1]) == (begun, ended)
            for index, (start, end) in enumerate(stages):
                assert free[index] <= start < end
                assert index == 0 or stages[index - 1][1] <= start
                free[index] = end
        assert free[-1] <= case["seconds"]


def test_ranks_wait_no_longer_than_a_step_takes(cases):
    for case in (case for case in cases if case["kind"] != "pipeline"):
        for begun, ended, *_, (exchange, *experts) in case["steps"]:
            seconds = experts[0] if experts else 0.0
            assert 0 < exchange < ended - begun - seconds


def test_every_use_of_an_expert_is_on_one_rank(cases):
    for case in (case for case in cases if case["kind"] == "experts"):
        for _, _, prompts, decoding, (_, _, loads) in case["steps"]:
            assert len(loads) == case["ranks"]
            assert sum(loads) == 2 * (prompts + decoding)  # experts of a token


def test_several_devices_are_sooner_done_where_there_is_something_to_compute(cases):
    for case in cases:
        assert case["seconds"] < case["alone"] or case["load"] == "answers"
