"""What an engine says of itself, as the model of cost wants it."""

from __future__ import annotations

import pytest
from kv_layers import kv_layers

from octavo.cost.loaded_model import computed_in, live_rank_model
from octavo.cost.rank_model import AttentionOp, Experts
from octavo.cost.work import RowCounts, matrix_work
from octavo.models.footprint import WeightMatrix


class Config:
    num_layers, num_heads, head_dim = 4, 3, 16
    kv_layers = kv_layers(512, None, 512, 512)
    hidden_size, vocab_size = 10, 99


def test_a_model_of_its_config_and_of_what_it_weighs():
    matrices = [
        WeightMatrix(False, 100, 50, "int4 x int8"),
        WeightMatrix(True, 30, 60, "bfloat16"),
        WeightMatrix(False, 20, 11, "float32"),
        WeightMatrix(False, 100, 50, "int4 x int8"),
    ]
    model = live_rank_model(Config, matrices, kv_bytes_per_token=40.0)
    ops = {op.num_params: op for op in model.matrices}
    assert {params: (op.count, op.num_bytes, op.arithmetic) for params, op in ops.items()} == {
        100: (2, 50, "int8"),
        20: (1, 11, "fp32"),
        30: (1, 60, "fp16"),
    }
    assert [op.sampled_only for op in model.matrices] == [False, False, True]
    assert set(model.attention) == {
        AttentionOp("attention.512", 3, 4.0 * 48, 10.0, window=512),
        AttentionOp("attention", 1, 4.0 * 48, 10.0),
    }
    assert model.weights_bytes == 171 and model.kv_bytes_per_token == 40.0
    assert model == live_rank_model(Config, matrices[::-1], 40.0)  # in whatever order they come


def test_experts_of_a_layer_are_read_if_a_token_uses_them():
    """Two layers of three matrices each in four experts, and one more that is packed otherwise."""
    alike = [WeightMatrix(False, 100, 50, "int4 x int8", (2, 4))] * 24
    other = [WeightMatrix(False, 100, 200, "float32", (2, 4))]
    model = live_rank_model(Config, [*alike, *other], 8)
    assert [(op.count, op.num_params, op.num_bytes, op.experts) for op in model.matrices] == [
        (6, 400, 200, Experts(4, 2, on_rank=4)),
        (1, 100, 200, Experts(4, 2, on_rank=1)),
    ]
    assert model.weights_bytes == 24 * 50 + 200
    work = matrix_work(model.matrices[0], RowCounts(1, 1, [0]), model)
    assert (work.bytes, work.flops) == pytest.approx((6 * 100, 6 * 2 * 100 * 2))


def test_without_windows_all_layers_are_alike():
    class Plain(Config):
        kv_layers = kv_layers(None, None, None, None)

    assert live_rank_model(Plain, [], 8).attention == (AttentionOp("attention", 4, 4.0 * 48, 2.0),)


def test_ranks_share_the_attention_as_they_share_its_kv():
    """In a layer each has some heads; of a pipeline, some layers."""
    whole, part = live_rank_model(Config, [], 40.0), live_rank_model(Config, [], 10.0, num_ranks=4)
    for one, other in zip(whole.attention, part.attention, strict=True):
        assert other.flops_per_score == one.flops_per_score / 4
        assert other.kv_bytes_per_token == one.kv_bytes_per_token / 4


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("int8", "int8"),
        ("int4 x int8", "int8"),
        ("bfloat16", "fp16"),
        ("torch float16", "fp16"),
        ("torch float32", "fp32"),
        ("", "fp16"),
    ],
)
def test_arithmetic_of_kernels(name, arithmetic):
    assert computed_in(name) == arithmetic
