from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.base.errors import BenchmarkError, RequestError
from octavo.bench.offline import closed_loop
from octavo.bench.offline.closed_loop import run_closed_loop, staggered
from octavo.bench.offline.session import OfflineSession
from octavo.settings.engine import EngineArgs
from octavo.workload.datasets import random_requests


@pytest.fixture(scope="module")
def session(tiny_model):
    with OfflineSession(
        EngineArgs(model=str(tiny_model), device="cpu", kernels="reference")
    ) as session:
        yield session


def requests(count, output_len=6, seed=0):
    return random_requests(count, 256, 12, output_len, seed=seed)


def count_in_flight(session, monkeypatch):
    """How many requests the engine has at the beginning of each step."""
    engine, found = session.loaded.text_engine, []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (found.append(len(engine.groups)), step())[1])
    return found


def let_steps_take_a_second(session, monkeypatch):
    """And nothing else any time, so that no neighbour can come between two steps."""
    engine, now = session.loaded.text_engine, [0.0]
    step = engine.step

    def take_a_second():
        now[0] += 1.0
        return step()

    monkeypatch.setattr(engine, "step", take_a_second)
    monkeypatch.setattr(closed_loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))


def test_as_one_ends_the_next_begins(session, monkeypatch):
    in_flight = count_in_flight(session, monkeypatch)
    let_steps_take_a_second(session, monkeypatch)
    timing = run_closed_loop(session, requests(9), 3)
    assert len(timing.requests) == 9
    assert set(in_flight) == {3}
    assert timing.num_output_tokens == 9 * 6
    assert timing.num_prompt_tokens == 9 * 12
    assert timing.elapsed_s == len(in_flight)
    assert timing.mean_batch == 3
    assert all(each.gaps_s == [1.0] * 5 for each in timing.requests)
    assert not session.loaded.text_engine.has_unfinished_requests


def test_answers_are_those_of_a_batch(session):
    asked = requests(5)
    timing = run_closed_loop(session, asked, 2)
    answers = {each.request.request_id: each.output_token_ids for each in timing.requests}
    assert [answers[each.request_id] for each in asked] == session.run(asked).output_token_ids


def test_the_window_is_open_while_the_engine_is_full(session, monkeypatch):
    in_flight = count_in_flight(session, monkeypatch)
    asked = requests(20)
    timing = run_closed_loop(
        session, [*staggered(asked[:4]), *asked[4:]], 4, num_ramp=4, num_measured=5
    )
    assert len(timing.requests) >= 5
    assert set(in_flight[:-1]) == {4}
    ramp = {each.request_id for each in asked[:4]}
    assert ramp.isdisjoint(each.request.request_id for each in timing.requests)
    # Those of the ramp end one after another, and so do the others, which are of one length.
    assert len({each.stats.last_token_time for each in timing.requests}) == len(timing.requests)
    assert timing.num_output_tokens > 5 * 6  # those in flight at both ends count, too
    assert not session.loaded.text_engine.has_unfinished_requests


def test_tokens_before_the_window_do_not_count(session):
    asked = requests(2, output_len=10)
    timing = run_closed_loop(session, asked, 1, num_ramp=1)
    assert timing.num_output_tokens == 19  # the ramp's first token opens it
    assert timing.num_prompt_tokens == 12
    assert [each.request.request_id for each in timing.requests] == [asked[1].request_id]


def test_staggered_answers_end_one_after_another():
    assert [each.output_len for each in staggered(requests(4, output_len=10))] == [3, 5, 8, 10]


def test_a_ramp_longer_than_the_loop_is_an_error(session):
    with pytest.raises(BenchmarkError, match="ramp"):
        run_closed_loop(session, requests(2), 2, num_ramp=3)


def test_what_cannot_be_served_leaves_nothing_behind(session):
    with pytest.raises(RequestError):
        run_closed_loop(session, [*requests(1), *requests(1, output_len=500)], 2)
    assert not session.loaded.text_engine.has_unfinished_requests
    assert len(run_closed_loop(session, requests(2), 2).requests) == 2
