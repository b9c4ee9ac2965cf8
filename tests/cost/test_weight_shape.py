from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.cost.parallel import Parallel
from octavo.cost.weight_shape import WeightShape
from octavo.models.tensor_split import Split, split_of

matrices = st.builds(
    WeightShape,
    name=st.sampled_from(["mlp.gate", "mlp.up_proj", "mlp.down_proj"]),  # one of each split
    part=st.sampled_from(["mlp", "experts"]),
    outputs=st.integers(1, 500),
    inputs=st.integers(1, 500),
    experts=st.integers(1, 20),
)
layouts = st.builds(lambda tp, ways: Parallel(tp=tp * ways, ep=ways), *[st.integers(1, 5)] * 2)


@given(matrices, layouts)
def test_shares_together_are_the_whole_and_hardly_more(weight, parallel):
    share = weight.of_rank(parallel)
    devices = parallel.num_devices
    assert share.num_params * devices >= weight.num_params
    assert share.outputs <= weight.outputs
    assert share.inputs <= weight.inputs
    if weight.split is Split.NOTHING and not weight.has_experts:
        assert share == weight
    elif weight.split is not Split.NOTHING:
        per_expert = weight.num_params / weight.experts
        rounding = (weight.outputs + weight.inputs) * share.experts + per_expert
        assert share.num_params <= weight.num_params / devices + rounding


@given(matrices)
def test_one_device_has_all(weight):
    assert weight.of_rank(Parallel()) == weight


def test_a_head_is_never_cut():
    keys = WeightShape("self_attn.k_proj", "attention", 4 * 128, 64, units=4)
    assert [keys.of_rank(Parallel(tp=tp)).outputs for tp in (1, 2, 4, 8, 16)] == [
        *(512, 256, 128, 128, 128)
    ]


def test_experts_are_dealt_out_whole_or_cut():
    experts = WeightShape("mlp.experts.up_proj", "experts", 96, 64, "", 0, 8, 2)
    dealt = experts.of_rank(Parallel(tp=4, ep=4))
    assert (dealt.experts, dealt.outputs) == (2, 96)
    both = experts.of_rank(Parallel(tp=4, ep=2))
    assert (both.experts, both.outputs) == (4, 48)
    cut = experts.of_rank(Parallel(tp=4))
    assert (cut.experts, cut.outputs) == (8, 24)
    over_copies = experts.of_rank(Parallel(tp=1, dp=4, ep=4))
    assert (over_copies.experts, over_copies.outputs) == (2, 96)


def test_the_axis_of_a_tensor_follows_from_its_name():
    for name, split in (
        ("model.layers.3.self_attn.q_proj.weight", Split.OUTPUTS),
        ("self_attn.q_proj.bias", Split.OUTPUTS),
        ("self_attn.o_proj", Split.INPUTS),
        ("self_attn.o_proj.bias", Split.NOTHING),  # it is added once, after the sum
        ("model.layers.0.mlp.experts.17.up_proj.weight", Split.OUTPUTS),
        ("mlp.shared_experts.down_proj.weight", Split.INPUTS),
        ("mlp.shared_expert_gate", Split.NOTHING),
        ("self_attn.q_a_proj", Split.NOTHING),
        ("lm_head.weight", Split.OUTPUTS),
        ("model.norm.weight", Split.NOTHING),
    ):
        assert split_of(name) is split, name
        assert WeightShape(name, "mlp", 8, 8).split is split
