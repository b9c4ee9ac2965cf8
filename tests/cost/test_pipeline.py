"""Stages of a pipeline: together they are the model, and each has what it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.cost.catalogue import spec_of
from octavo.cost.find_device import find_device
from octavo.cost.parallel import Parallel
from octavo.cost.pipeline import Pipeline, StageTimes
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
