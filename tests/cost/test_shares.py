"""What the fullest rank of a tensor-parallel group has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.engine_profile import profile
from octavo.cost.find_device import find_device
from octavo.cost.mixers import Attention
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import on_devices, rank_model
from octavo.cost.shares import WHOLE, shares
from octavo.cost.weight_shape import WeightShape, columns
from octavo.kernels.cpu.layout import TILE
from octavo.kernels.parts import Part
from octavo.kernels.sum_pieces import most_heads, pieces_of

GATHER = Parallel(tp=2, scheme="gather")


def test_uneven_heads_are_those_of_the_rank_that_has_more():
    two, three, four = (shares(tp, "gather") for tp in (2, 3, 4))
    assert [each.heads(9) for each in (two, three, four)] == [5, 3, 3]
    # Of 3 KV heads, whose query heads are 0-2, 3-5 and 6-8: heads 4 to 8 read two of them.
    assert [each.kv_heads(9, 3) for each in (two, three, four)] == [2, 1, 2]


def test_kv_heads_are_repeated_where_there_are_more_ranks():
    assert [shares(tp, "gather").kv_heads(16, 2) for tp in (1, 2, 4, 8, 16)] == [2, 1, 1, 1, 1]
    assert shares(3, "gather").kv_heads(14, 2) == 2  # 4, 5 and 5: the second rank reads both


def test_devices_that_add_up_need_even_heads():
    shares(3).check("it", [9], [])
    with pytest.raises(ConfigError, match="it: its 9 heads cannot be shared out to tp = 2 devices"):
        shares(2).check("it", [9], [])
    shares(2, "gather").check("it", [9], [])
    with pytest.raises(ConfigError, match="10 ranks cannot share its 9 heads.*nearest is 9"):
        shares(10, "gather").check("it", [9, 12], [])
    with pytest.raises(ConfigError, match="nearest is 24"):
        shares(65_536, "gather").check("it", [], [24])


def test_octavo_has_whole_kv_heads_or_single_heads_where_these_are_too_few():
    two, four = shares(2, "uneven sum"), shares(4, "uneven sum")
    # 9 query heads and 3 KV heads: a rank has one of these with all that read it, the other two.
    assert (two.heads(9, 3), two.kv_heads(9, 3)) == (6, 2)
    # Four ranks have 2, 2, 2 and 3 heads. Some read two KV heads.
    assert (four.heads(9, 3), four.kv_heads(9, 3)) == (3, 2)
    with pytest.raises(ConfigError, match="10 ranks cannot share its 9 heads.*nearest is 9"):
        shares(10, "uneven sum").check("it", [9, 12], [])


@given(st.integers(1, 32), st.integers(1, 6), st.integers(2, 16))
def test_matrices_of_heads_are_those_of_the_rank_that_has_most(kv_heads, group, tp):
    heads = kv_heads * group
    if heads < tp:
        return
    units = (group, 1)
    pieces = [pieces_of(heads, units, part, False) for part in Part(size=tp).of_all_ranks()]
    queries, keys = most_heads(pieces, group)
    layout = Parallel(tp=tp, scheme="uneven sum")
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=8)
    q, k, v, o = [each.of_rank(layout) for each in attention.weights(40)]
    assert (q.outputs, k.outputs, v.outputs) == (8 * queries, 8 * keys, 8 * keys)
    assert (o.inputs, o.outputs) == (8 * queries, 40)
    assert attention.kv_vectors(layout.shares)[0] == keys
    if not kv_heads % tp:
        assert shares(tp).heads(heads) == queries and shares(tp).kv_heads(heads, kv_heads) == keys


def test_plans_share_heads_as_the_engine_does():
    spec = spec_of("smollm2-135m")  # 9 heads
    h100, _ = find_device("h100-sxm")
    for engine, scheme in (("octavo", "uneven sum"), ("vllm", "sum")):
        found = on_devices(spec, Parallel(tp=2), h100, profile(engine))
        assert found.scheme == scheme
        if engine == "vllm":
            with pytest.raises(ConfigError, match="9 heads cannot be shared out to tp = 2"):
                rank_model(spec, precision_of(spec), found)
        else:
            assert rank_model(spec, precision_of(spec), found).parallel.tp == 2
    assert on_devices(spec, Parallel(tp=3), h100, profile("octavo")).scheme == "sum"
    epyc, _ = find_device("epyc-turin")
    assert on_devices(spec, Parallel(tp=2), epyc, profile("octavo")).scheme == "gather"


@given(heads=st.integers(1, 128), group=st.integers(1, 8), tp=st.integers(1, 16))
def test_no_rank_has_more_and_one_has_as_much(heads, group, tp):
    found = shares(tp, "gather")
    queries = [len(Part(rank, tp).of_heads(heads * group)) for rank in range(tp)]
    keys = [len(Part(rank, tp).of_kv_heads(heads * group, heads)) for rank in range(tp)]
    assert found.heads(heads * group) == max(queries)
    assert found.kv_heads(heads * group, heads) == max(keys)
    assert found.kv_heads(heads * group, heads) * group >= found.heads(heads * group)


@given(outputs=st.integers(1, 5000), tp=st.integers(1, 16))
def test_rows_are_cut_in_tiles_or_not_at_all(outputs, tp):
    weight = WeightShape("mlp.down_proj", "mlp", outputs, 7)
    share = weight.of_rank(Parallel(tp=tp, scheme="gather"))
    assert share.inputs == 7  # inputs never are
    if outputs < TILE * tp or tp == 1:
        assert share == weight
    else:
        assert outputs / tp <= share.outputs < outputs / tp + 2 * TILE


def test_projections_to_heads_are_cut_by_heads():
    query, key = (
        columns(f"self_attn.{name}_proj", "", heads, 64, 576, 9)
        for name, heads in (("q", 9), ("k", 3))
    )
    assert query.of_rank(GATHER).outputs == 5 * 64
    assert key.of_rank(GATHER).outputs == 2 * 64


def test_a_rank_scans_its_heads_and_has_whole_vectors():
    assert shares(4, "gather").pieces(6) == shares(4).pieces(6) == 2
    assert shares(2, "gather").channels(80) == 48 and shares(2).channels(80) == 40
    assert shares(4, "gather").channels(50) == 50  # a tile for each there is not
    bias = WeightShape("mlp.up_proj.bias", "norm", 512)
    assert bias.of_rank(GATHER) == bias


def test_processors_gather_and_others_add_up():
    assert Parallel(tp=2).on("cpu").scheme == "gather"
    assert Parallel(tp=2).on("gpu") == Parallel(tp=2) == Parallel(tp=2).on("cpu").on("unified")
    assert Parallel().on("cpu") == Parallel()  # of one rank nothing is shared


def test_one_rank_has_all():
    weight = WeightShape("lm_head", "head", 50_257, 64, units=786)
    assert WHOLE.matrix(weight) == (50_257, 64)
    assert not WHOLE.exchanges(50_257) and not shares(1, "gather").exchanges(50_257)
