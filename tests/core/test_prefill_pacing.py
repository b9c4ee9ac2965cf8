from __future__ import annotations

import math

import pytest

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.clock import VirtualClock
from octavo.core.prefill_pacing import MIN_CHUNK, Pacer


def batch(make_request, *num_tokens: int, num_sampled: int = 1) -> Batch:
    request = make_request("a", [1])
    return Batch(0, tuple(ScheduledRequest(request, 0, n, num_sampled) for n in num_tokens))


def seconds(batch: Batch) -> float:
    """Of a machine that takes 10 ms for the weights, and 1 ms for each token."""
    return 0.010 + 0.001 * batch.num_tokens


def test_a_prompt_gets_what_the_target_leaves(make_request):
    pacer = Pacer(0.080)
    for each in (batch(make_request, *[1] * 10), batch(make_request, *[1] * 10, 100)):
        pacer.observe(each, seconds(each))
    tokens = pacer.prompt_tokens(10)
    assert tokens == 60  # 20 ms of decoding, and 60 of this
    assert seconds(batch(make_request, *[1] * 10, tokens)) == pytest.approx(0.080)


def test_nothing_is_paced_where_nobody_waits_or_nothing_is_known(make_request):
    pacer, step = Pacer(0.080), batch(make_request, 512)
    assert pacer.prompt_tokens(3) == math.inf
    pacer.observe(step, 1.0)
    assert pacer.prompt_tokens(0) == math.inf
    assert pacer.prompt_tokens(3) < 512
    unbounded = Pacer(0.0)
    unbounded.observe(step, 1.0)
    assert unbounded.prompt_tokens(3) == math.inf


def test_a_step_may_last_four_times_as_long_as_one_that_decodes(make_request):
    """However slow the model is, prompts get through."""
    pacer = Pacer(0.080)
    pacer.observe(batch(make_request, 1), 0.2)
    pacer.observe(batch(make_request, 1, 100), 1.2)
    assert pacer.prompt_tokens(1) == 60  # 0.8 seconds, of which 0.2 are the decode's
    pacer.observe(batch(make_request, 1, 100), 100.0)
    assert pacer.prompt_tokens(1) == MIN_CHUNK


def test_multi_step_teaches_nothing(make_request):
    pacer = Pacer(0.080)
    pacer.observe(batch(make_request, 1, num_sampled=8), 5.0)
    pacer.observe(batch(make_request, 1, 100), 0.2)
    assert pacer.prompt_tokens(1) == 40


def test_what_was_learned_can_be_asked_for(make_request):
    pacer = Pacer(0.080)
    assert pacer.decode_seconds == pacer.prompt_token_seconds == 0.0
    for each in (batch(make_request, 1), batch(make_request, 1, 100)):
        pacer.observe(each, seconds(each))
    assert pacer.decode_seconds == pytest.approx(0.011)
    assert pacer.prompt_token_seconds == pytest.approx(0.001)


def test_one_slow_step_is_soon_forgotten(make_request):
    pacer = Pacer(0.080)
    steps = [batch(make_request, *[1] * 10), batch(make_request, *[1] * 10, 60)]
    pacer.observe(steps[1], 20.0)
    for _ in range(40):
        for step in steps:
            pacer.observe(step, seconds(step))
    assert 50 <= pacer.prompt_tokens(10) <= 60


class SlowExecutor:
    """The hash model's answers, on a clock on which steps take time."""

    def __init__(self, executor, clock: VirtualClock):
        self._executor, self._clock = executor, clock
        self.steps: list[tuple[Batch, float]] = []

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, batch: Batch):
        self.steps.append((batch, seconds(batch)))
        self._clock.advance_to(self._clock.now() + seconds(batch))
        return self._executor.submit(batch)


def slow_run(make_engine, make_request, run, **config):
    engine = make_engine(num_blocks=512, max_num_batched_tokens=256, max_model_len=512, **config)
    engine.clock = VirtualClock()
    engine.executor = executor = SlowExecutor(engine.executor, engine.clock)
    for name in "abcd":
        engine.add(make_request(name, list(range(ord(name), ord(name) + 20)), max_tokens=64))
    for _ in range(8):
        engine.step()
    for name in "xyz":
        engine.add(make_request(name, list(range(ord(name), ord(name) + 300)), max_tokens=8))
    answers = {request.request_id: request.output_token_ids for request in run(engine)}
    return answers, executor.steps


def test_who_is_being_answered_waits_no_longer_than_the_target(make_engine, make_request, run):
    free, free_steps = slow_run(make_engine, make_request, run)
    paced, steps = slow_run(make_engine, make_request, run, target_step_seconds=0.080)
    assert paced == free  # answers do not depend on how prompts are cut

    def longest(steps) -> float:
        waits = [t for batch, t in steps if any(item.num_tokens == 1 for item in batch.items)]
        return max(waits)

    assert longest(free_steps) > 0.250
    assert longest(steps) <= 0.081


def test_without_chunks_nothing_is_paced(make_engine):
    engine = make_engine(
        max_num_batched_tokens=64,
        max_model_len=64,
        enable_chunked_prefill=False,
        target_step_seconds=0.08,
    )
    assert engine.scheduler.pacer.target_seconds == 0


def test_the_target_is_no_negative_time(make_engine):
    with pytest.raises(ConfigError, match="target_step_seconds"):
        make_engine(target_step_seconds=-1)
