"""What ranks say to each other, by the formulas."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_models import llama3_70b, mixture

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.communication import (
    Link,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    exchange_of,
    link_between,
    link_of,
    merge_transfers,
    point_to_point,
    transfers,
)
from octavo.cost.find_device import find_device
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.rank_model import Exchange
from octavo.cost.work import RowCounts, Span, passes

LINK = Link(100.0, (0.5, 0.6, 0.8), latency_s=1.0)


def test_formulas_by_hand():
    # Two ranks reach 50 a second, four 60, eight 80; floors of 1, 1.25 and 1.5 seconds.
    assert all_reduce(100, 2, LINK) == pytest.approx(1 + 2 * 1 / 2 * 100 / 50)
    assert all_reduce(100, 4, LINK) == pytest.approx(1.25 + 2 * 3 / 4 * 100 / 60)
    assert all_reduce(100, 8, LINK) == pytest.approx(1.5 + 2 * 7 / 8 * 100 / 80)
    assert all_gather(100, 4, LINK) == pytest.approx(1.25 + 3 / 4 * 100 / 60)
    assert all_to_all(100, 8, LINK) == pytest.approx(1.5 + 7 / 8 * 100 / 80)
    assert point_to_point(100, LINK) == pytest.approx(1 + 100 / 50)


def test_one_rank_says_nothing():
    assert all_reduce(100, 1, LINK) == all_gather(100, 1, LINK) == 0.0


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(2, 64))
def test_more_bytes_never_take_less(few, more, num_ranks):
    few, more = sorted((few, more))
    for operation in (all_reduce, all_gather, all_to_all):
        assert operation(few, num_ranks, LINK) <= operation(more, num_ranks, LINK)


@pytest.mark.parametrize(
    ("name", "bus"),
    [
        ("a100-80 sxm", {2: 156e9, 4: 167e9, 8: 174e9}),
        ("h100 sxm", {2: 274e9, 4: 317e9, 8: 365e9}),
    ],
)
def test_large_sums_as_they_were_measured(name, bus):
    """Bus bandwidth of 64 MB by Vidur's profiles: 2 (n-1)/n bytes / seconds."""
    link = link_of(find_device(name)[0])
    for num_ranks, measured in bus.items():
        seconds = all_reduce(64e6, num_ranks, link)
        found = 2 * (num_ranks - 1) / num_ranks * 64e6 / seconds
        assert found == pytest.approx(measured, rel=0.05)


def test_small_sums_of_a_decode_step_are_not_for_nothing():
    """Two in each of 80 layers: one to three milliseconds."""
    model = llama3_70b(parallel=Parallel(tp=8))
    (rows,) = passes([Span(100, 1)])
    embedding, layers, head = transfers(model, rows, link_of(find_device("h100 sxm")[0]))
    assert (embedding.count, embedding.num_bytes) == (1, 8192 * 2)
    assert (layers.name, layers.count) == ("layers.all_reduce", 160)
    assert 1e-3 < layers.seconds < 3e-3
    assert layers.num_bytes == 160 * 8192 * 2
    assert (head.name, head.num_bytes) == ("head.all_gather", 128_256 * 4)


def test_nothing_is_gathered_where_nothing_is_sampled():
    (rows,) = passes([Span(0, 100, 0)])
    said = transfers(llama3_70b(parallel=Parallel(tp=2)), rows, LINK)
    assert [each.name for each in said] == ["embedding.all_reduce", "layers.all_reduce"]


def test_stages_send_on():
    (rows,) = passes([Span(0, 100)])
    (sent,) = transfers(llama3_70b(parallel=Parallel(pp=4), sent_rows=3), rows, LINK)
    assert (sent.name, sent.count, sent.num_bytes) == ("stages.send", 3, 3 * 100 * 8192 * 2)
    assert sent.seconds == pytest.approx(3 * point_to_point(100 * 8192 * 2, LINK))


@pytest.mark.parametrize(
    "name, rows",
    [("llama-3.1-8b", 3), ("gemma-2-9b", 6), ("mixtral-8x7b", 3), ("deepseek-v3", 6)],
)
def test_two_rows_go_on_where_the_next_stage_norms_or_adds(name, rows):
    """Plans count the rows that `tests/kernels/test_stages.py` finds between stages."""
    spec = spec_of(name)
    assert rank_model(spec, precision_of(spec), Parallel(pp=4)).sent_rows == rows
    assert rank_model(spec, precision_of(spec), Parallel()).sent_rows == 0


def test_a_pipeline_of_groups_sums_in_all_layers():
    (rows,) = passes([Span(9, 1)])
    parallel = Parallel(tp=2, pp=4)
    _, layers, _, sent = transfers(llama3_70b(parallel=parallel), rows, LINK)
    assert layers.count == 160 and sent.count == 3


def test_experts_of_a_group_that_shares_its_rows_are_summed():
    (rows,) = passes([Span(9, 1)] * 4)
    for ep in (1, 4):
        said = transfers(mixture(Parallel(tp=4, ep=ep)), rows, LINK)
        assert [(each.name, each.count) for each in said] == [
            ("embedding.all_reduce", 1),
            ("layers.all_reduce", 96),
            ("head.all_gather", 1),
        ]


def test_experts_elsewhere_are_sent_their_rows():
    (rows,) = passes([Span(9, 1)] * 4)
    (sent,) = transfers(mixture(Parallel(ep=8, dp=8)), rows, LINK)
    assert (sent.name, sent.count) == ("experts.all_to_all", 2 * 48)
    # Once to each rank that has one of the 8 experts, of 16 of 128.
    ranks = 8 * (1 - prod((112 - i) / (128 - i) for i in range(8)))
    assert sent.num_bytes == pytest.approx(2 * 48 * 4 * ranks * 2048 * 2)
    _, attention, _, experts, gathered = transfers(mixture(Parallel(tp=2, ep=8, dp=4)), rows, LINK)
    assert attention.count == 48  # after attention only
    assert experts.num_bytes == sent.num_bytes / 2  # either rank of a group sends half
    assert (gathered.name, gathered.count) == ("experts.all_gather", 48)
    assert gathered.num_bytes == 48 * 4 * 2048 * 2


def test_rows_of_products_in_fp8_are_sent_in_fp8_where_devices_have_it():
    (rows,) = passes([Span(9, 1)] * 4)
    model = mixture(Parallel(ep=8, dp=8))
    model = replace(model, matrices=tuple(replace(m, arithmetic="fp8") for m in model.matrices))
    (wide,), (narrow,) = (
        transfers(model, rows, replace(LINK, sends_fp8=has_fp8)) for has_fp8 in (False, True)
    )
    assert narrow.num_bytes == pytest.approx(wide.num_bytes * (1 + 4 / 128 + 2) / 4)
    assert narrow.seconds < wide.seconds
    assert [link_of(find_device(name)[0]).sends_fp8 for name in ("a100-sxm", "h100-sxm")] == [
        False,
        True,
    ]


def test_transfers_of_passes_add_up():
    (rows,) = passes([Span(9, 1)])
    said = transfers(llama3_70b(parallel=Parallel(tp=2)), rows, LINK)
    twice = merge_transfers([*said, *said])
    assert twice == tuple(
        Transfer(each.name, 2 * each.count, 2 * each.num_bytes, 2 * each.seconds) for each in said
    )


def test_beyond_an_island_there_is_a_network():
    h100, gb200, pair = (
        link_of(find_device(name)[0]) for name in ("h100 sxm", "gb200", "h100 nvl")
    )
    assert (h100.island, gb200.island, pair.island) == (8, 72, 2)
    assert h100.reached(16) == 40e9 < h100.reached(8)
    assert h100.floor_s(16) > 2 * h100.floor_s(8)
    assert gb200.reached(16) == gb200.reached(8) and pair.reached(4) == 40e9
    assert point_to_point(1e6, h100, 16) > point_to_point(1e6, h100, 8)


def test_links_by_their_kind():
    pcie, nvlink = (link_of(find_device(name)[0]) for name in ("rtx4090", "h100 sxm"))
    assert 12e9 <= pcie.reached(2) <= 20e9 and 20e-6 <= pcie.floor_s(2) <= 40e-6
    assert nvlink.floor_s(8) > nvlink.floor_s(4) > nvlink.floor_s(2)
    assert nvlink.reached(3) == nvlink.reached(4)
    with pytest.raises(ConfigError, match="M2 Max has no link"):
        link_of(find_device("m2 max")[0])


# -- ranks that share memory ----------------------------------------------------------------------


def test_a_layer_meets_four_times():
    """Attention, its output, the product of gate and up, and the MLP's output."""
    found = exchange_of(spec_of("llama-3.1-8b"), 2)
    assert found == Exchange(32 * (4096 + 4096 + 14_336 + 4096), 128_256, 4 * 32)
    assert found.token_bytes / 2 / 32 == 52 * 1024  # that a rank reads of the other in a layer
    assert found == exchange_of(spec_of("llama-3.1-8b"), 8)


@pytest.mark.parametrize(
    ("name", "layers", "values", "meetings"),
    [
        ("qwen2.5-0.5b", 24, 14 * 64 + 896 + 4864 + 896, 4),
        ("smollm2-135m", 30, 9 * 64 + 576 + 1536 + 576, 4),
        # Queries and keys are normed over all heads at once.
        ("olmo-2-7b", 32, 2 * 4096 + 4096 + 4096 + 11_008 + 4096, 5),
        # Router, the inner sizes of 8 experts, and their sum.
        ("qwen3-30b-a3b", 48, 4096 + 2048 + 128 + 8 * 768 + 2048, 5),
        # 8 experts are no tile for each rank: every rank routes.
        ("mixtral-8x7b", 32, 4096 + 4096 + 2 * 14_336 + 4096, 4),
    ],
)
def test_exchanged_values_by_hand(name, layers, values, meetings):
    found = exchange_of(spec_of(name), 2)
    assert (found.token_values, found.meetings) == (layers * values, layers * meetings)


def test_what_has_no_tile_for_each_rank_is_computed_by_all():
    """128 experts are 8 tiles."""
    spec = spec_of("qwen3-30b-a3b")
    few, many = exchange_of(spec, 8), exchange_of(spec, 9)
    assert few.token_values - many.token_values == 48 * 128
    assert few.meetings - many.meetings == 48


def test_one_rank_exchanges_what_it_would_not():
    spec = spec_of("llama-3.1-8b")
    assert rank_model(spec, precision_of(spec), Parallel().on("cpu")).exchange is None


def test_exchanges_are_transfers_that_grow_with_rows():
    spec = spec_of("smollm2-135m")
    model = rank_model(spec, precision_of(spec), Parallel(tp=2).on("cpu"))
    link = link_of(replace(find_device("xeon-spr")[0], link_bandwidth=20e9))
    (rows,) = passes([Span(9, 1)] * 3 + [Span(0, 10, 0)])
    layers, head = transfers(model, rows, link)
    assert (layers.name, layers.count) == ("layers.gather", 120)
    assert layers.num_bytes == 13 * 391_680
    assert layers.seconds == pytest.approx(120e-6 + 13 * 391_680 / 2 / 20e9)
    assert (head.name, head.count, head.num_bytes) == ("head.gather", 1, 3 * 4 * 49_152)
    (prompt,) = passes([Span(0, 10, 0)])
    assert [each.name for each in transfers(model, prompt, link)] == ["layers.gather"]


@pytest.mark.parametrize(
    ("num_bytes", "measured"),
    [(16_384, 1.5e-6), (262_144, 7.5e-6), (1_048_576, 26.4e-6), (4_194_304, 97e-6)],
)
def test_shared_memory_as_it_was_measured(num_bytes, measured):
    """Meeting, and reading the half that another process has written, on two quiet cores."""
    two_cores = replace(find_device("epyc-genoa")[0], link_bandwidth=40e9, is_measured=True)
    link = link_of(replace(two_cores, num_cores=2).shared_by(2))
    assert all_gather(num_bytes, 2, link) == pytest.approx(measured, rel=0.15)


def test_layouts_of_processors_that_cannot_be():
    device, _ = find_device("xeon-spr")
    assert link_between(device, Parallel(tp=8)).bandwidth == device.memory_bandwidth / 4
    with pytest.raises(ConfigError, match="16 ranks do not share the memory of one machine, but 8"):
        link_between(device, Parallel(tp=16))
    with pytest.raises(ConfigError, match="16 ranks do not share.*choose tp x pp = 8"):
        link_between(device, Parallel(tp=4, pp=4))
    assert link_between(device, Parallel(tp=2, ep=2)) == link_between(device, Parallel(tp=2))
    with pytest.raises(ConfigError, match="choose ep = tp, here 1, or 1"):
        link_between(device, Parallel(dp=2, ep=2))


def test_stages_on_processors_send_32_bit_floats():
    """And those on GPUs activations, of 16 bits: the same rows, once between two stages."""
    rows = RowCounts(7, 1, [0])
    for name, width in (("xeon-spr", 4), ("h100-sxm", 2)):
        device, _ = find_device(name)
        parallel = Parallel(pp=3).on(device.kind)
        spec = spec_of("llama-3.1-8b")
        model = rank_model(spec, precision_of(spec), parallel)
        (sent,) = transfers(model, rows, link_between(device, parallel))
        assert (sent.name, sent.count) == ("stages.send", 2)
        assert sent.num_bytes == 2 * 7 * spec.hidden_size * width
