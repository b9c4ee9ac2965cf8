"""Stages of a pipeline: together they are the model, and each has what it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.cost.catalogue import spec_of
from octavo.cost.find_device import find_device
from octavo.cost.parallel import Parallel
from octavo.cost.pipeline import Pipeline, PipelineClock, StageTimes
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model, stage_models
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span

SPEC = spec_of("smollm2-135m")  # 30 layers
PRECISION = precision_of(SPEC)


def pipeline(hardware: str = "h100-sxm", **degrees: int) -> tuple[Pipeline, StepModel]:
    device, _ = find_device(hardware)
    parallel = Parallel(**degrees).on(device.kind)
    whole = rank_model(SPEC, PRECISION, parallel)
    return (
        Pipeline.of(SPEC, PRECISION, parallel, device, "octavo"),
        StepModel.of(whole, device, "octavo"),
    )


def step(*chunks: Span) -> SimpleNamespace:
    return SimpleNamespace(items=list(chunks), num_multi_steps=1)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_stages_together_are_the_model(tp, pp):
    models = stage_models(SPEC, PRECISION, Parallel(tp=tp, pp=pp))
    whole = rank_model(SPEC, PRECISION, Parallel(tp=tp))
    assert sum(model.num_layers for model in models) == SPEC.num_layers
    assert sum(model.weights_bytes for model in models) == whole.weights_bytes
    assert sum(model.kv_bytes_per_token for model in models) == whole.kv_bytes_per_token
    heads = [[op for op in model.matrices if op.sampled_only] for model in models]
    assert [len(head) for head in heads] == [0] * (pp - 1) + [1]


def test_ranks_of_all_stages_exchange_what_those_of_one_do():
    models = stage_models(SPEC, PRECISION, Parallel(tp=2, pp=3, scheme="gather"))
    whole = rank_model(SPEC, PRECISION, Parallel(tp=2, scheme="gather")).exchange
    assert sum(model.exchange.token_values for model in models) == whole.token_values
    assert sum(model.exchange.meetings for model in models) == whole.meetings


@pytest.mark.parametrize("pp", [2, 4])
def test_a_step_through_all_stages_has_the_head_once(pp):
    """With 30 layers in four stages the longest stage is not the one with the head."""
    found, whole = pipeline(pp=pp)
    batch = step(*[Span(500, 1)] * 8, Span(0, 64))
    # `StepModel` takes all stages to be as long as the longest one.
    assert found.seconds(batch) == pytest.approx(whole.seconds(batch), rel=0.08)
    assert found.seconds(batch) <= whole.seconds(batch) * (1 + 1e-9)


def test_the_last_stage_computes_the_head():
    found, _ = pipeline(pp=3)
    first, second, last = found.times(step(*[Span(100, 1)] * 4)).stages
    assert first == second < last
    unsampled = found.times(step(Span(0, 64, 0))).stages
    assert unsampled[0] == unsampled[1] == unsampled[2]


def test_times_of_processors_have_the_meetings_of_their_ranks():
    alone, _ = pipeline("xeon-spr", pp=2)
    shared, _ = pipeline("xeon-spr", tp=2, pp=2)
    batch = step(Span(100, 1))
    assert alone.times(batch).send == shared.times(batch).send > 1e-6
    assert shared.times(batch).stages[0] < alone.times(batch).stages[0]


def test_seconds_of_a_step_alone_and_behind_others():
    times = StageTimes([2.0, 3.0], send=0.5, overhead=0.25)
    assert times.through_all == 5.75 and times.slowest == 3.0
    assert times.period() == 6.0 and times.period(1) == 5.75  # twice what the second stage takes
    assert StageTimes([1.0, 1.0], overhead=2.0).period() == 4.0  # of one process for all steps
    assert times.scaled(2.0).through_all == 11.5


@pytest.mark.parametrize(
    "steps, stages, seconds",
    [
        ([4.0, 2.0, 1.0], 1, 7.0),
        ([1.0, 1.0, 1.0], 4, 6.0),  # they begin at 0, 1 and 2
        ([2.0, 0.5], 2, 4.5),  # the second waits for the first, in each stage
        ([2.0, 2.0, 2.0], 2, 8.0),  # the third begins when the first is through
    ],
)
def test_steps_follow_each_other_through_stages(steps, stages, seconds):
    clock = PipelineClock(stages)
    for step in steps:
        done = clock.step(StageTimes([step] * stages))
    assert done == clock.done == seconds
    assert clock.pass_by(10.0) == clock.done == seconds + 10.0


def test_steps_wait_for_the_slowest_stage_and_for_the_process_that_reads_results():
    clock, times = PipelineClock(2), StageTimes([1.0, 3.0], send=0.5, overhead=0.25)
    assert [clock.step(times) for _ in range(4)] == [4.75, 7.75, 10.75, 13.75]
    slow = PipelineClock(2)
    assert [slow.step(StageTimes([1.0, 1.0], overhead=5.0)) for _ in range(3)] == [7, 12, 17]


def test_a_chunk_takes_as_long_as_in_the_slowest_stage():
    found, _ = pipeline(pp=4)  # of 8, 8, 7 and 7 layers
    chunk = found.chunk_seconds(100)
    times = found.times(step(Span(0, 100, 0)))
    assert 0.5 * times.slowest < chunk < times.slowest  # without attention
