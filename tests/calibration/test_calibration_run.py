"""A real engine, a tiny one: its steps timed, and what is foreseen of it beside what comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.session import OfflineSession
from octavo.calibration.calibration_run import _drift, _Pace, about, calibrate, profile_of, steps_of
from octavo.calibration.fit import TimedStep
from octavo.calibration.live_run import run_live
from octavo.calibration.loads import CalibrationLoad
from octavo.calibration.slowness import between, slowness_now
from octavo.calibration.validate import (
    METRICS,
    TRACES,
    ValidationRow,
    summary,
    validate,
    validation_cases,
)
from octavo.cost.hardware import Device
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import Span, passes
from octavo.settings.engine import EngineArgs
from octavo.workload.datasets import random_requests

DEVICE = Device(
    name="test",
    kind="cpu",
    memory_bytes=1e9,
    memory_bandwidth=1e10,
    peaks={"fp32": 1e11, "fp16": 1e11, "int8": 1e11},
)


@pytest.fixture(scope="module")
def session(tiny_model):
    args = EngineArgs(
        model=str(tiny_model), max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64
    )
    with OfflineSession(args) as session:
        yield session


@pytest.fixture(scope="module")
def steps(session):
    return calibrate(session, quick=True)


def test_steps_are_timed_and_told(session, steps):
    assert steps.most_rows == 64 and steps.most_seqs == 4
    assert set(steps.spreads) == {"decode", "prompt", "mixed"}
    profile = profile_of(session, steps, "2026-01-01T00:00:00+00:00")
    assert profile.about == about(session)
    assert profile.about["threads"] >= 1 and profile.about["model_bytes"] > 0
    assert profile.engine["max_num_seqs"] == 4


def test_turns_tell_how_far_the_machine_drifts(steps):
    def turn(seconds):
        return {"load": [TimedStep((), seconds)], "another": [TimedStep((), 1.0)]}

    assert _drift([turn(1.0), turn(3.0), turn(1.5)]) == pytest.approx(1.5 / 2.5)
    assert _drift([turn(1.0), {"load": [TimedStep((), 1.1)]}]) == pytest.approx(0.05 / 1.05)
    assert _drift([turn(1.0)]) == 0.1  # nothing is known of it


def test_progress_is_told(session):
    heard = []
    calibrate(session, quick=True, progress=lambda what, share: heard.append(share))
    assert heard == sorted(heard) and heard[0] >= 0 and heard[-1] <= 1


def test_what_would_take_too_long_is_left_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr("octavo.calibration.calibration_run.time.perf_counter", lambda: now)
    pace = _Pace(60.0)
    short, long = CalibrationLoad("short", ((16, 4),)), CalibrationLoad("long", ((4000, 96),))
    assert pace.has_room_for(long)  # nothing is known yet
    now = 1.0
    pace.note(short)  # 20 tokens a second
    assert pace.has_room_for(short) and not pace.has_room_for(long)
    now = 59.5
    assert not pace.has_room_for(short) and pace.share == pytest.approx(59.5 / 60)


def test_what_prompts_share_is_read_once(session):
    trial = CalibrationLoad("alike", ((40, 6),) * 3, shared=32)
    size = session.loaded.config.cache.block_size
    shared = 32 // size * size
    decoding = [s for s in steps_of(session, trial, 0) if s.passes[0].num_prompt_tokens == 0]
    assert decoding
    for step in decoding:
        first = step.passes[0]
        assert first.num_seqs == 3
        # Each writes one key, and reads what it sees.
        read = first.decode_scores + first.num_seqs
        assert first.decode_keys == read - 2 * shared


def test_the_machine_is_as_slow_as_its_steps_are(session, steps):
    now = slowness_now(session, steps, seed=0)
    assert set(now) == {"decode", "prompt", "mixed"} and now["prompt"] == now["mixed"]
    assert all(0.4 <= value <= 2.5 for value in now.values())
    doubled = replace(steps, slowness=dict.fromkeys(now, 2.0))
    made = StepFeatures.of(next(passes([Span(10, 1)])))
    assert doubled.seconds(made) == pytest.approx(2 * steps.seconds(made))
    assert between({"decode": 1.0}, {"decode": 3.0}) == {"decode": 2.0}


def test_requests_are_sent_when_they_are_due(session):
    requests = random_requests(5, session.vocab_size, 20, 6)
    times = [0.0, 0.0, 0.05, 0.1, 0.1]
    records = run_live(session, requests, times, cache_salt="a")
    for record, due in zip(records, times, strict=True):
        assert record.completed and record.output_tokens == 6 and record.sent == due
        assert due < record.first_token <= record.last_token
        assert record.event_times == sorted(record.event_times)
        assert record.cached_tokens == 0


def test_prefixes_are_shared_within_a_run_alone(session):
    requests = random_requests(3, session.vocab_size, 20, 2, prefix_len=64)
    times = [0.0, 0.2, 0.4]
    for salt in "bc":
        records = run_live(session, requests, times, cache_salt=salt)
        assert [record.cached_tokens for record in records] == [0, 64, 64]


def test_what_is_foreseen_stands_beside_what_comes(session, steps):
    some = list(
        validation_cases(session, DEVICE, steps, repeats=2, num_requests=6, traces=TRACES[1:3])
    )
    assert [(case.trace, case.repeat) for case in some] == [
        (trace.name, repeat) for trace in TRACES[1:3] for repeat in (0, 1)
    ]
    rows = validate(session, DEVICE, steps, some)
    assert len(rows) == len(some) * len(METRICS)
    for row in rows:
        assert row.live > 0 and row.low <= row.simulated <= row.high
        assert row.as_json()["error"] == pytest.approx(row.simulated / row.live - 1)


def test_more_than_an_engine_takes_is_an_error(session, steps):
    with pytest.raises(BenchmarkError, match="request 0 failed"):
        list(validation_cases(session, DEVICE, steps, traces=TRACES[3:]))


def test_the_summary_is_of_all_rows_of_a_figure():
    rows = [
        ValidationRow("t", 0, "ttft", 10.0, 11.0, 9.0, 12.0, 13.0),
        ValidationRow("t", 1, "ttft", 10.0, 7.0, 6.0, 8.0, 8.0),
        ValidationRow("t", 0, "tpot", 2.0, 2.0, 2.0, 2.0, 2.0),
    ]
    found = summary(rows)
    assert found["ttft"] == pytest.approx(
        {
            "mean_abs_error": 0.2,
            "max_abs_error": 0.3,
            "inside_interval": 0.5,
            "mean_abs_error_as_calibrated": 0.25,
        }
    )
    assert found["tpot"]["max_abs_error"] == 0
