"""Divided steps: what is exchanged, and that no rank overwrites what another reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_models import CONFIGS, LLAMA, random_model
from hybrid_models import RECURRENCES, make_hybrid

from octavo.cost.communication import exchange_of
from octavo.cost.spec_of_config import spec_of_config
from octavo.kernels import fused_ops
from octavo.kernels.division import Division
from octavo.kernels.fused_ops import CannotFuse, FusedHead, FusedLinear, FusedRecurrence
from octavo.kernels.parts import Part
from octavo.kernels.recurrence_specs import DeltaSpec, ScanSpec
from octavo.runtime.op_program import plan_step

MODELS = {
    **{name: lambda config=config: random_model(config) for name, config in CONFIGS.items()},
    **{name: lambda name=name: make_hybrid(name)[0] for name in RECURRENCES},
}


@pytest.fixture(params=MODELS)
def ops(request):
    return plan_step(MODELS[request.param]())[0].ops


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_exchanged_is_what_a_plan_says(name, size):
    config = CONFIGS[name]
    ops = plan_step(random_model(config))[0].ops
    planned = exchange_of(spec_of_config(config), size)
    assert Division(ops, Part(0, size)).exchanged(ops) == (
        planned.token_values,
        planned.row_values,
    )


@pytest.mark.parametrize("name", [name for name, each in CONFIGS.items() if each.latent])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_ranks_of_their_own_requests_exchange_is_what_a_plan_says(name, size):
    config = CONFIGS[name]
    ops = plan_step(random_model(config))[0].ops
    planned = exchange_of(spec_of_config(config), size, dp_attention=True)
    division = Division(ops, Part(0, size, by_sequences=True))
    assert division.exchanged(ops) == (planned.token_values, planned.row_values)
    assert sum(map(division.meets, ops)) == planned.meetings


def test_a_layer_of_llama_meets_four_times():
    config = replace(LLAMA, num_layers=5, layer_windows=(None,) * 5)
    ops = plan_step(random_model(config))[0].ops
    division = Division(ops, Part(1, 2))
    assert sum(map(division.meets, ops)) == 4 * 5


def test_one_rank_divides_nothing(ops):
    division = Division(ops)
    assert division.exchanged(ops) == (0, 0)
    for op in ops:
        assert division.meets(op)  # its threads do, behind every op
        if isinstance(op, FusedLinear):
            for index, segment in enumerate(op.segments):
                assert division.rows(op, index) == range(segment.weight.shape[0])


@pytest.mark.parametrize("size", [2])
def test_ranks_together_make_every_shared_column_once(ops, size):
    divisions = [Division(ops, Part(rank, size)) for rank in range(size)]
    for op in ops:
        if not isinstance(op, FusedLinear):
            continue
        for index, segment in enumerate(op.segments):
            ranges = [division.rows(op, index) for division in divisions]
            if op.activation is None and divisions[0].is_shared(segment.out):
                assert [row for each in ranges for row in each] == list(segment_rows(segment))
            elif not divisions[0].is_shared(op.segments[0].out):
                assert all(ranges), "a rank computes something, or all"


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_compute_every_column_of_recurrent_layers(name, size):
    """Each column of a scan is of one rank; so are those of a norm, unless all compute it whole,
    and channels, but for those that heads of several ranks read."""
    ops = plan_step(make_hybrid(name)[0])[0].ops
    divisions = [Division(ops, Part(rank, size)) for rank in range(size)]
    for op in ops:
        if not isinstance(op, FusedRecurrence):
            continue
        made = [
            [column for columns in division.columns(op) for column in columns]
            for division in divisions
        ]
        together = [column for each in made for column in each]
        assert set(together) == set(range(op.out.width))
        if isinstance(op.spec, ScanSpec | DeltaSpec):
            assert together == list(range(op.out.width))
            assert all(len(each) < op.out.width for each in made)
        elif divisions[0].is_shared(op.out):
            assert len(together) == op.out.width


def segment_rows(segment):
    return range(segment.weight.shape[0])


@pytest.mark.parametrize("size", [2])
def test_no_rank_overwrites_what_another_may_still_read(ops, size):
    """A rank is at most as far ahead of another as to the next meeting."""
    division = Division(ops, Part(0, size))
    made: list[tuple[bool, int]] = []
    free: list[int] = []

    def allocate(value):
        kind = division.is_shared(value), value.width
        for place in free:
            if made[place] == kind:
                free.remove(place)
                return place
        made.append(kind)
        return len(made) - 1

    places = fused_ops.place(ops, allocate, free.append, sharing=division)
    holds = {}
    read_by_others: set[int] = set()  # places that a slower rank may still be reading
    for op in ops:
        reads, residual = list(fused_ops.reads(op)), getattr(op, "residual", None)
        for value in reads:
            assert holds[places[value]] is value, "read after its place was given away"
        for value in fused_ops.writes(op):
            if division.is_shared(value):
                assert places[value] not in read_by_others, "written while others read it"
            # Of its residual, a rank reads only what it overwrites.
            assert places[value] not in {places[v] for v in reads if v is not residual}
            holds[places[value]] = value
        read_by_others |= {places[v] for v in reads if division.is_shared(v)}
        if division.meets(op) or isinstance(op, FusedHead):
            read_by_others.clear()


def test_more_ranks_than_heads_are_refused():
    ops = plan_step(random_model(LLAMA))[0].ops
    with pytest.raises(CannotFuse, match="4 heads cannot be divided among 5 ranks"):
        Division(ops, Part(0, 5))
