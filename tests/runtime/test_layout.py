"""Layouts that cannot be are refused with the nearest that can."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.runtime.layout import (
    RankBounds,
    check_ranks,
    device_of_rank,
    parse_ranks,
    resolve_ranks,
    why_one_rank,
)

GIB = 1 << 30


def bounds(**given) -> RankBounds:
    return RankBounds(model="tiny", **given)


@pytest.mark.parametrize(
    ("tp", "given", "words"),
    [
        (10, {"num_heads": 9, "num_cores": 64}, "share its 9 heads.*; the nearest is 9"),
        (10, {"num_heads": 9, "num_cores": 4}, "9 heads.*; the nearest is 4"),
        (4, {"num_heads": 9, "num_cores": 2}, "need a core each, and 2 may be used.*nearest is 2"),
        (4, {"num_gpus": 1}, "4 ranks need a GPU each, and 1 GPU can be used; the nearest is 1"),
        (6, {"num_slices": 8, "num_gpus": 7}, "8 slices, which 6 ranks .*; the nearest is 4"),
        (2, {"why_alone": "this is a toaster"}, "this is a toaster; the nearest is 1"),
        (
            4,
            {"free_bytes": 3 * GIB, "needed_bytes": lambda tp: (2 + tp / 2) * GIB},
            "4 ranks need 4.00 GiB together, and 3.00 GiB of memory are free; the nearest is 2",
        ),
        (
            2,
            {"free_bytes": GIB, "needed_bytes": lambda tp: 2.0 * GIB},
            "no other number can be either",
        ),
        (
            1,
            {"free_bytes": GIB, "needed_bytes": lambda tp: 2.0 * GIB},
            "1 rank need.*no other number can be either",
        ),
    ],
)
def test_what_cannot_be(tp, given, words):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={tp}: tiny: .*{words}"):
        check_ranks(tp, bounds(**given))


@pytest.mark.parametrize(
    ("tp", "given"),
    [
        (1, {"num_heads": 1, "num_cores": 1, "why_alone": "this is a toaster"}),
        (9, {"num_heads": 9, "num_cores": 9}),
        (5, {"free_bytes": GIB, "needed_bytes": lambda tp: float(GIB)}),
        (1000, {}),
    ],
)
def test_what_can_be(tp, given):
    check_ranks(tp, bounds(**given))


def test_auto_is_the_nearest_to_one_a_node():
    assert resolve_ranks("auto", bounds(num_heads=9), num_nodes=2) == 2
    assert resolve_ranks("auto", bounds(num_heads=3), num_nodes=8) == 3
    assert resolve_ranks("auto", bounds(why_alone="this is a toaster"), num_nodes=8) == 1
    assert resolve_ranks(4, bounds(num_heads=9), num_nodes=2) == 4
    with pytest.raises(ConfigError, match="nearest is 3"):
        resolve_ranks(4, bounds(num_heads=3), num_nodes=2)


def test_a_model_that_fits_nowhere_is_no_matter_of_auto():
    too_large = bounds(free_bytes=1.0, needed_bytes=lambda tp: 2.0)
    with pytest.raises(ConfigError, match="no other number"):
        resolve_ranks("auto", too_large, num_nodes=2)


def test_where_there_can_be_one_rank_only():
    assert why_one_rank("native", "cpu", "linux") is None
    assert "native CPU kernels" in str(why_one_rank("reference", "cpu", "linux"))
    assert "this is darwin" in str(why_one_rank("native", "cpu", "darwin"))
    assert why_one_rank("fused", "cuda:1", "linux") is None
    assert why_one_rank("fused", "cpu", "linux") is None
    assert "stages of a pipeline need" in str(why_one_rank("fused", "cuda", "linux", pp=2))
    assert "fused kernels, and these are reference" in str(why_one_rank("reference", "cuda"))


def test_ranks_have_a_gpu_each():
    assert [device_of_rank("cpu", rank) for rank in range(2)] == ["cpu", "cpu"]
    assert [device_of_rank("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of_rank("cuda:2", 1) == "cuda:3"


@pytest.mark.parametrize("text", ["auto", "1", "16", 2])
def test_numbers_of_ranks(text):
    assert parse_ranks(text) == ("auto" if text == "auto" else int(text))


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", 0, -3, True, 2.0, None, "AUTO"])
def test_what_is_no_number_of_ranks(text):
    with pytest.raises(ConfigError, match="an integer of at least 1, or auto, not"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("tp", "pp", "given", "words"),
    [
        (1, 9, {"num_layers": 4}, "9 stages cannot have its 4 layers.*; .* pipeline_.*_size=4$"),
        (2, 4, {"num_cores": 6}, "4 stages of 2 ranks need a core each, and 6 may be used.*=3$"),
        (1, 8, {"num_cores": 2}, "8 stages of 1 rank need a core.*is pipeline_parallel_size=2$"),
        (9, 2, {"num_heads": 4, "num_cores": 64}, "9 ranks cannot share its 4 heads.*=2$"),
        (2, 2, {"why_alone": "a toaster"}, "a toaster; the nearest is pipeline_parallel_size=1$"),
        (
            2,
            3,
            {"free_bytes": 5 * GIB, "needed_bytes": lambda count: count * GIB},
            "6 ranks need 6.00 GiB together, .* tensor_parallel_size=2, pipeline_.*_size=2$",
        ),
        (1, 2, {"free_bytes": 0.0, "needed_bytes": lambda count: count * GIB}, "no other number"),
    ],
)
def test_pipelines_that_cannot_be(tp, pp, given, words):
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size={pp}: tiny: .*{words}"):
        check_ranks(tp, bounds(**given), pp)


def test_stages_share_the_nodes_of_auto():
    assert resolve_ranks("auto", bounds(), num_nodes=4, pp=2) == 2
    assert resolve_ranks("auto", bounds(), num_nodes=1, pp=2) == 1
