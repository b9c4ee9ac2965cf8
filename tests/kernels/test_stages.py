"""Stages of a step: every op is in one of them, and each hands on what the next one reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_models import CONFIGS, deeper, random_model
from hybrid_models import RECURRENCES, make_hybrid

from octavo.cost.spec_of_config import spec_of_config
from octavo.kernels import fused_ops
from octavo.kernels.fused_ops import CannotFuse, FusedRecurrence
from octavo.kernels.parts import WHOLE_MODEL, Part, Stage
from octavo.kernels.stages import stage_of
from octavo.runtime.op_program import plan_step

MODELS = {
    **{name: lambda c=config: random_model(deeper(c, 5)) for name, config in CONFIGS.items()},
    **{name: lambda name=name: make_hybrid(name)[0] for name in RECURRENCES},
}


@pytest.fixture(params=MODELS)
def plan(request):
    return plan_step(MODELS[request.param]())[0]


def without_layer(op):
    return replace(op, layer=0) if hasattr(op, "layer") and op.layer is not None else op


@pytest.mark.parametrize("count", [2, 3, 5])
def test_stages_have_all_ops_once_in_their_order(plan, count):
    if count > plan.num_layers:
        pytest.skip("it has fewer layers")
    stages = [plan.stage(Stage(index, count)) for index in range(count)]
    ops = [op for stage in stages for op in stage.ops]
    assert list(map(without_layer, ops)) == list(map(without_layer, plan.ops))
    for kind in ("kv_layers", "state_layers"):
        assert [n for stage in stages for n in getattr(stage, kind)] == [
            *range(sum(len(getattr(stage, kind)) for stage in stages))
        ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_a_stage_reads_was_handed_on(plan, count):
    if count > plan.num_layers:
        pytest.skip("it has fewer layers")
    handed_on = ()
    for index in range(count):
        stage = plan.stage(Stage(index, count))
        assert stage.inputs == handed_on
        known = {*stage.inputs}
        for op in stage.ops:
            assert known.issuperset(fused_ops.reads(op))
            known.update(fused_ops.writes(op))
        assert known.issuperset(stage.outputs)
        handed_on = stage.outputs
    assert handed_on == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_count_the_rows_that_stages_hand_on(name):
    config = deeper(CONFIGS[name], 5)
    plan, layers = plan_step(random_model(config))[0], spec_of_config(config).layers
    sent = [plan.stage(Stage(index, 5)).outputs for index in range(4)]
    widths = [sum(value.width for value in values) for values in sent]
    assert widths == [config.hidden_size * layer.rows_after for layer in layers[:4]]


def test_layers_are_counted_from_the_first_of_a_stage(plan):
    for index in range(2):
        stage = plan.stage(Stage(index, 2))
        for kinds, layers in (
            (fused_ops.MIXERS, stage.kv_layers),
            (FusedRecurrence, stage.state_layers),
        ):
            own = {op.layer for op in stage.ops if isinstance(op, kinds)} - {None}
            assert own == set(range(len(layers)))


def test_weights_are_those_of_the_stage(plan):
    first, last = (plan.rows_of(Part(), Stage(index, 2)) for index in (0, 1))
    everything = plan.rows_of(Part())
    for name, rows in everything.items():
        of_stages = [each[name] for each in (first, last) if each[name]]
        assert of_stages and all(each == rows for each in of_stages)
        assert len(of_stages) == 1 or name == "model.embed_tokens.weight"  # tied
    drafting = plan.rows_of(Part(), Stage(1, 2), with_embedding=True)
    assert drafting["model.embed_tokens.weight"] == everything["model.embed_tokens.weight"]


def test_hidden_states_of_drafters_are_handed_on_to_the_last_stage():
    config = deeper(CONFIGS["llama"], 6)
    plan, _ = plan_step(random_model(config))
    early, late = plan.streams([1, 5]).values()
    stages = [plan.stage(Stage(index, 3), [early, late]) for index in range(3)]
    for stage in stages[1:]:
        assert early in stage.inputs
        assert len(stage.inputs) == 2
    assert all(early not in plan.stage(Stage(index, 3)).inputs for index in range(3))


def test_the_whole_model_is_one_stage(plan):
    whole = plan.stage(WHOLE_MODEL)
    assert (whole.ops, whole.inputs, whole.outputs) == (plan.ops, (), ())


def test_layers_in_another_order_are_refused():
    plan, _ = plan_step(random_model(deeper(CONFIGS["llama"], 4)))
    layers = {id(matrix): plan._layer_of(matrix) for matrix in plan.matrices()}

    def backwards(matrix):
        layer = layers[id(matrix)]
        return None if layer is None else 3 - layer

    with pytest.raises(CannotFuse, match="layers before layer 2 are mixed with later ones"):
        stage_of(plan.ops, Stage(0, 2), 4, backwards)


@pytest.mark.parametrize(
    ("num_layers", "count", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (30, 4, [7, 8, 8, 7]), (3, 3, [1, 1, 1]), (8, 3, [3, 3, 2])],
)
def test_layers_are_dealt_out(num_layers, count, sizes):
    stages = [Stage(index, count).layers(num_layers) for index in range(count)]
    assert [len(layers) for layers in stages] == sizes
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
