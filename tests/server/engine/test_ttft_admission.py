"""Requests are admitted by their predicted time to first token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_models import llama_8b

from octavo.base.errors import InvalidRequestError, QueueFullError
from octavo.core.stats import StepStats
from octavo.cost.hardware import Device
from octavo.cost.step_cost import StepModel
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.waiting_queue import QueuedWork

FACTS = EngineFacts(4096, 8, 99, 1024, 16, max_num_batched_tokens=512, target_step_seconds=0.08)
DEVICE = Device(
    name="a processor",
    kind="cpu",
    memory_bytes=64e9,
    memory_bandwidth=100e9,
    peaks={"fp16": 20e12},
    is_measured=True,
)
STEPS = StepModel.of(llama_8b(), DEVICE)
NOTHING_WAITS = QueuedWork(0, 0, 0)
IDLE = replace(StepStats.idle(1024), predicted_seconds=0.0, measured_seconds=0.0)
BUSY = replace(IDLE, num_running=1, num_used_blocks=4)


def admission(most_seconds: float) -> TTFTAdmission:
    admission = TTFTAdmission(most_seconds)
    admission.set_step_model(STEPS, FACTS)
    return admission


def after(stats: StepStats, real: float, predicted: float, num_prompt_tokens: int = 0) -> StepStats:
    """The record of a step that took so long."""
    return replace(
        stats,
        measured_seconds=stats.measured_seconds + real,
        predicted_seconds=stats.predicted_seconds + predicted,
        num_prompt_tokens=num_prompt_tokens,
    )


def test_as_long_as_nothing_is_known_everybody_may_come_in():
    assert TTFTAdmission(1e-9).check(FACTS, BUSY, QueuedWork(99, 9999, 99999), 4000) is None


def test_a_longer_queue_takes_longer_until_it_takes_too_long():
    watched, predicted = admission(10.0), []
    with pytest.raises(QueueFullError, match="predicted to take .* with .* 1 running") as refusal:
        for count in range(100):
            waiting = QueuedWork(count, 300 * count, 45_150 * count)
            predicted.append(watched.check(FACTS, BUSY, waiting, 300))
    assert len(predicted) > 3 and predicted == sorted(predicted) and predicted[-1] <= 10.0
    assert 0 < refusal.value.retry_after < 10.0
    assert "may take 10,000 ms" in str(refusal.value)


def test_a_prompt_that_alone_takes_too_long_is_an_error_of_its_own():
    """Not "try again later", which it would be told for ever."""
    watched = admission(2.0)
    assert watched.check(FACTS, IDLE, NOTHING_WAITS, 10) < 2.0
    assert watched.check(FACTS, IDLE, NOTHING_WAITS, 4000) > 2.0  # but no prompt has been timed yet
    watched.note_step(IDLE, after(IDLE, 0.2, 0.1, num_prompt_tokens=100))
    for stats in (IDLE, BUSY):
        with pytest.raises(InvalidRequestError, match="4000 tokens, which alone .* shorten it"):
            watched.check(FACTS, stats, NOTHING_WAITS, 4000)


def test_a_prediction_that_was_too_slow_refuses_no_request():
    watched = admission(2.0)
    watched.note_step(IDLE, after(IDLE, 0.01, 0.1, num_prompt_tokens=100))
    assert watched.check(FACTS, BUSY, NOTHING_WAITS, 4000) < 2.0


def test_steps_that_take_longer_than_predicted_count():
    watched, usual = admission(10.0), admission(10.0).check(FACTS, BUSY, NOTHING_WAITS, 300)
    watched.note_step(BUSY, after(BUSY, 0.3, 0.1, num_prompt_tokens=100))
    assert watched.check(FACTS, BUSY, NOTHING_WAITS, 300) == pytest.approx(3 * usual, rel=0.1)
    for _ in range(50):  # and are forgotten
        watched.note_step(BUSY, after(BUSY, 0.1, 0.1, num_prompt_tokens=100))
        watched.note_step(BUSY, after(BUSY, 0.1, 0.1))
    assert watched.check(FACTS, BUSY, NOTHING_WAITS, 300) == pytest.approx(usual, rel=0.05)


def test_an_idle_engine_takes_whom_it_could_serve_however_slow_it_was():
    """Else nothing would ever tell that it has become quicker."""
    watched = admission(2.0)
    watched.note_step(BUSY, after(BUSY, 100.0, 0.1, num_prompt_tokens=100))
    with pytest.raises(QueueFullError):
        watched.check(FACTS, BUSY, NOTHING_WAITS, 10)
    assert watched.check(FACTS, IDLE, NOTHING_WAITS, 10) > 2.0


def test_without_a_step_model_by_what_the_pacer_has_learned():
    watched = TTFTAdmission(1.0)
    learned = replace(BUSY, decode_seconds=0.02, prompt_token_seconds=0.001, predicted_seconds=None)
    watched.note_step(learned, learned)
    # A step has 60 ms for prompts beside requests that decode.
    seconds = watched.check(FACTS, learned, NOTHING_WAITS, 300)
    assert seconds == pytest.approx(300 / 60 * 0.02 + 0.3)
    with pytest.raises(QueueFullError):
        watched.check(FACTS, learned, QueuedWork(2, 600, 90_300), 300)
    alone = replace(learned, num_running=0)
    assert watched.check(FACTS, alone, NOTHING_WAITS, 5000) > 1.0  # it knows no better


def test_answers_that_ended_tell_when_seats_become_free():
    watched, full = admission(1e6), replace(BUSY, num_running=8)
    waiting = QueuedWork(4, 40, 400)
    unknown = watched.check(FACTS, full, waiting, 10)
    watched.note_answer(1000)
    assert watched.check(FACTS, full, waiting, 10) > 10 * unknown
