"""Times of steps: the formula, published measurements, and what must hold of any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_models import llama2_7b, llama2_70b, llama3_70b, llama_8b, mixture, opt_13b

from octavo.cost.communication import Link
from octavo.cost.efficiency import IDEAL, Efficiency
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Prediction
from octavo.cost.rank_model import MatrixOp, RankModel
from octavo.cost.step_cost import StepCost, StepFeatures, StepModel
from octavo.cost.work import Span


@dataclass
class Batch:
    items: Sequence[Span]
    num_multi_steps: int = 1


def steps(model: RankModel, hardware: str, profile: str = "vllm", **more) -> StepModel:
    return StepModel.of(model, find_device(hardware)[0], profile, **more)


def device(bandwidth: float = 1e12, peak: float = 1e15, **more) -> Device:
    return Device(
        name="d",
        kind="gpu",
        memory_bytes=1e11,
        memory_bandwidth=bandwidth,
        peaks={"fp16": peak},
        **more,
    )


def weights(num_params: float, num_bytes: float, **more) -> RankModel:
    """Of which a step reads everything once, and nothing else."""
    op = MatrixOp("weights", 1, 0, 0, int(num_params), num_bytes, **more)
    return RankModel((op,), (), 0, 0, 1, activation_bytes=0)


def ops(cost: StepCost) -> dict[str, float]:
    """Milliseconds of one layer, by operation."""
    return {op.name: op.seconds / op.count * 1e3 for op in cost.ops}


# -- reference cases ------------------------------------------------------------------------------


@pytest.mark.parametrize(("billions", "ms"), [(70, 70), (7, 7), (405, 405)])
def test_the_memory_wall(billions, ms):
    """R19: 14.3, 143 and 2.5 tokens a second at 2 TB/s, of weights alone."""
    model = StepModel(weights(billions * 1e9, 2e9 * billions), device(2e12), IDEAL)
    total = model.cost([Span(0, 1)]).total
    assert total.value == pytest.approx(ms * 1e-3) and total.low == total.high == total.value
    assert 1 / total.value == pytest.approx({70: 14.3, 7: 143, 405: 2.5}[billions], rel=0.02)


@pytest.mark.parametrize(
    ("hardware", "rows", "up_ms", "down_ms", "tolerance"),
    [
        ("a100-80 sxm", 1, 0.580, 0.290, 0.10),
        ("a100-80 sxm", 4096, 16.04, 8.12, 0.10),
        ("h100 sxm", 1, 0.311, 0.171, 0.10),
        ("h100 sxm", 4096, 5.71, 2.67, 0.10),
    ],
)
def test_matrices_of_llama_2_70b(hardware, rows, up_ms, down_ms, tolerance):
    """R21: Vidur's profiles."""
    found = ops(steps(llama2_70b(), hardware).cost([Span(0, rows, 0)]))
    assert found["mlp.up"] == pytest.approx(up_ms, rel=tolerance)
    assert found["mlp.down"] == pytest.approx(down_ms, rel=tolerance)


def test_decoding_of_opt_13b():
    """R25: DistServe's fits on A100, of an engine without CUDA graphs."""
    for tp, ms in ((1, 19.93), (2, 13.29), (4, 10.26)):
        model = steps(opt_13b(parallel=Parallel(tp=tp)), "a100-80 sxm", eager=True)
        total = model.cost([Span(0, 1)]).total
        assert total.value * 1e3 == pytest.approx(ms, rel=0.3)
        assert total.low * 1e3 <= ms
    model = steps(opt_13b(), "a100-80 sxm")

    def ms_of(num_seqs: int, context: int) -> float:
        return model.cost([Span(context, 1)] * num_seqs).total.value * 1e3

    for_each_token = (ms_of(1, 4000) - ms_of(1, 2000)) / 2000
    assert for_each_token == pytest.approx(0.000627, rel=0.3)


def test_prompts_of_opt_13b():
    """R25: 18.10 + 0.1019 n + 7.12e-6 n^2 milliseconds, whose slope is 0.81 of the peak."""
    model = steps(opt_13b(), "a100-80 sxm")

    def ms_of(num_tokens: int) -> float:
        return model.cost([Span(0, num_tokens)]).total.value * 1e3

    slope = (ms_of(2048) - ms_of(1024)) / 1024
    assert slope == pytest.approx(0.1019 + 7.12e-6 * (2048 + 1024), rel=0.15)


def test_ceilings_of_an_h200():
    """R38: a large copy of 4.3 TB/s, products of 769 to 798 TFLOPS."""
    reads = steps(weights(1e9, 2e9), "h200 sxm").cost([Span(0, 1)]).ops[0]
    assert reads.bytes / reads.seconds == pytest.approx(4.3e12, rel=0.05)
    products = steps(weights(1e9, 2e9), "h200 sxm").cost([Span(0, 65_536)]).ops[0]
    assert products.flops / products.seconds == pytest.approx(783.5e12, rel=0.05)


def test_floors_of_a_70b_on_eight_h100():
    """R41: 70.55e9 weights of 8 bits: 2.63 ms to read, 4.46 ms to compute 500 tokens."""
    share = weights(70.55e9 / 8, 70.55e9 / 8, arithmetic="fp8")
    ideal = StepModel(share, find_device("h100 sxm")[0], IDEAL)
    assert ideal.cost([Span(0, 1)]).total.value == pytest.approx(2.63e-3, rel=2e-3)
    assert ideal.cost([Span(0, 500)]).total.value == pytest.approx(4.46e-3, rel=2e-3)
    fp8 = {"bytes_per_param": 1.0, "arithmetic": "fp8", "parallel": Parallel(tp=8)}
    decode = steps(llama3_70b(**fp8), "h100 sxm").cost([Span(600, 1)])
    assert 1e-3 < decode.comm.value < 3e-3
    assert decode.total.value > 2.63e-3 + decode.comm.value  # and launches, and the host


def test_nothing_beats_the_roofline():
    """Not the 180 tokens a second that are told of Llama 2 7B in 16 bits on an A100: 151 is what
    reading its weights allows."""
    model = steps(llama2_7b(), "a100-80 sxm")
    total = model.cost([Span(0, 1)]).total
    assert 1 / total.low < 151.5 < 180
    assert 90 < 1 / total.value < 130


# -- the formula ----------------------------------------------------------------------------------


def test_each_operation_takes_the_longer_of_its_two_times_and_they_add_up():
    head = MatrixOp("head", 1, 0, 0, 500, 500, sampled_only=True)
    linear = MatrixOp("linear", 1, 0, 0, 1000, 1500)
    model = RankModel((linear, head), (), 0, 0, 1, activation_bytes=0)
    cost = StepModel(model, device(bandwidth=1.0, peak=2.0), IDEAL).cost([Span(0, 1)])
    assert [op.seconds for op in cost.ops] == [1500, 500]
    assert {op.bound for op in cost.ops} == {"memory"} and cost.bound == "memory"
    many = StepModel(model, device(bandwidth=1.0, peak=2.0), IDEAL).cost([Span(0, 10)])
    assert [op.seconds for op in many.ops] == [10_000, 500] and many.bound == "compute"
    assert many.total.value == 10_500


def test_shares_launches_and_what_comes_once():
    efficiency = replace(
        IDEAL, memory=0.5, compute=0.25, launch_s=7.0, step_s=100.0, sequence_s=3.0
    )
    model = weights(1000, 1500)
    found = StepModel(model, device(1.0, 1e9), efficiency).cost([Span(0, 1), Span(5, 1)])
    assert found.total.value == pytest.approx(3000 + 7 + 100 + 2 * 3)
    found = StepModel(model, device(1e9, 1.0), efficiency).cost([Span(0, 1)])
    assert found.total.value == pytest.approx(8000 + 7 + 100 + 3)
    found = StepModel(model, device(1e9, 1e9), efficiency).cost([Span(0, 1)])
    assert found.ops[0].bound == "latency" and found.bound == "latency"


def test_the_corner_is_smooth():
    model = weights(1000, 2000)  # a row computes as long as it reads
    half = replace(IDEAL, sharpness=5.0)
    both = StepModel(model, device(1.0, 1.0), half).cost([Span(0, 1)]).total.value
    assert both == pytest.approx(2000 * 2 ** (1 / 5))
    summed = StepModel(model, device(1.0, 1.0), replace(IDEAL, sharpness=1.0))
    assert summed.cost([Span(0, 1)]).total.value == pytest.approx(4000)


def test_weights_are_unpacked_into_what_is_computed_in():
    """Of 4 bits in 16, and of 8 where there are no products of 8."""
    efficiency = replace(IDEAL, dequantized=0.5)
    prompt = [Span(0, 1000)]

    def seconds(bits: float, arithmetic: str, **peaks: float) -> float:
        model = weights(1000, 1000 * bits / 8, arithmetic=arithmetic)
        machine = replace(device(1e12), peaks={"fp16": 1.0, **peaks})
        return StepModel(model, machine, efficiency).cost(prompt).total.value

    assert seconds(16, "fp16") == pytest.approx(2e6)
    assert seconds(4.5, "fp16") == pytest.approx(4e6)
    assert seconds(8, "fp8") == pytest.approx(4e6)
    assert seconds(8.25, "fp8", fp8=2.0) == pytest.approx(1e6)
    assert seconds(8, "int8", int8=2.0) == pytest.approx(1e6)


def test_a_pipeline_goes_through_all_stages_and_one_head():
    link = Link(1e9, (1.0, 1.0, 1.0), 0.0)
    efficiency = replace(IDEAL, link=link)
    whole = StepModel(llama_8b(), device(), IDEAL).cost([Span(9, 1)])
    model = llama_8b(parallel=Parallel(pp=4), sent_rows=3)
    staged = StepModel(model, device(), efficiency).cost([Span(9, 1)])
    assert staged.compute.value == pytest.approx(whole.compute.value)
    assert staged.comm.value == pytest.approx(3 * 4096 * 2 / 1e9)


def test_multi_steps_are_steps_that_cost_their_overhead_once():
    model = steps(llama_8b(), "h100 sxm")
    apart = [model.cost([Span(100 + later, 1)]) for later in range(4)]
    together = model.cost([Span(100, 1, 4)], num_multi_steps=4)
    assert together.compute.value == pytest.approx(sum(each.compute.value for each in apart))
    assert together.overhead == apart[0].overhead
    assert sum(op.seconds for op in together.ops) == pytest.approx(together.compute.value)
    assert {op.name: op.count for op in together.ops}["mlp.up"] == 4 * 32


def test_verifying_drafts_uses_the_head_for_every_row():
    model = StepModel(weights(1000, 1.0, sampled_only=True), device(1e12, 1.0), IDEAL)
    assert model.cost([Span.verifying(50, 3)]).total.value == pytest.approx(4 * 2000)
    assert model.cost([Span(50, 4)]).total.value == pytest.approx(2000)


# -- intervals and sources ------------------------------------------------------------------------


def test_an_interval_is_as_wide_as_is_known_and_never_below_the_ceilings():
    model = llama_8b()
    cost = steps(model, "h100 sxm").cost([Span(1000, 1)])
    assert cost.total.source == "roofline"
    assert cost.total.low < cost.total.value < cost.total.high
    floor = StepModel(model, find_device("h100 sxm")[0], IDEAL).cost([Span(1000, 1)]).total
    assert cost.compute.low >= floor.value
    other = steps(model, "l4").cost([Span(1000, 1)]).compute
    assert other.high / other.value > cost.compute.high / cost.compute.value


class Curve:
    """Measured: a millisecond for each row."""

    def __init__(self) -> None:
        self.asked: list[StepFeatures] = []

    def seconds(self, features: StepFeatures) -> float:
        self.asked.append(features)
        return 1e-3 * features.num_tokens

    def prediction(self, features: StepFeatures) -> Prediction:
        return Prediction.around(self.seconds(features), 0.05, "measured")


def test_what_was_measured_takes_the_place_of_the_roofline():
    curve = Curve()
    parallel = Parallel(tp=2)
    model = steps(llama_8b(parallel=parallel), "h100 sxm", measured=curve)
    spans = [Span(100, 1), Span.verifying(50, 2)]
    cost = model.cost(spans)
    assert cost.compute.value + cost.comm.value == pytest.approx(4e-3)
    assert cost.compute.source == cost.comm.source == "measured"
    assert cost.total.source == "roofline"  # what comes once a step is not measured by it
    assert sum(op.seconds for op in cost.ops) == pytest.approx(cost.compute.value)
    assert sum(each.seconds for each in cost.transfers) == pytest.approx(cost.comm.value)
    assert model.seconds(Batch(spans)) == pytest.approx(cost.total.value, rel=1e-12)
    (features, again) = curve.asked
    assert features == again == StepFeatures(2, 4, 4, 0, 102 + 56, 101 + 51 + 52 + 53, 0, 0)


def test_keys_that_are_shared_are_read_once_where_that_was_measured():
    curve = Curve()
    spans = [Span(100, 1), Span(80, 1)]
    steps(llama_8b(), "h100 sxm", measured=curve).seconds(Batch(spans), shared_keys=64)
    (features,) = curve.asked
    assert features.decode_keys == 102 + 82 - 64 and features.decode_scores == 101 + 81
    plain = steps(llama_8b(), "h100 sxm")
    assert plain.seconds(Batch(spans), shared_keys=64) == plain.seconds(Batch(spans))
    assert plain.seconds(Batch([])) > 0


# -- what must hold of any step -------------------------------------------------------------------

chunks = st.lists(
    st.one_of(
        st.builds(Span, st.integers(0, 5000), st.integers(1, 600), st.integers(0, 1), st.none()),
        st.builds(Span, st.integers(0, 5000), st.just(1), st.integers(1, 8), st.none()),
        st.builds(Span.verifying, st.integers(0, 5000), st.integers(1, 8)),
    ),
    min_size=1,
    max_size=8,
)
MODELS = [
    steps(llama_8b(), "h100 sxm"),
    steps(llama_8b(bytes_per_param=0.56), "epyc-genoa", "octavo"),
    steps(llama3_70b(parallel=Parallel(tp=4, pp=2)), "a100-80 sxm"),
    steps(mixture(Parallel(ep=8, dp=8)), "h200 sxm"),
    steps(mixture(Parallel(tp=2)), "l40s", "llama.cpp"),
]


@given(st.sampled_from(MODELS), chunks, st.integers(1, 4))
def test_the_quick_way_agrees(model, spans, num_multi_steps):
    told = model.cost(spans, num_multi_steps).total.value
    assert model.seconds(Batch(spans, num_multi_steps)) == pytest.approx(told, rel=1e-9)


@given(st.sampled_from(MODELS), chunks, st.data())
def test_more_is_never_cheaper(model, spans, data):
    """More sequences; a longer context; more of a prompt. (A token that becomes a piece of a prompt
    changes to another operation, which may be there already: its reading then hides behind the
    computing of others, and its launch is theirs.)"""
    before = model.seconds(Batch(spans))
    slack = 1 + 1e-12
    more = data.draw(chunks)
    assert model.seconds(Batch([*spans, *more])) * slack >= before
    index = data.draw(st.integers(0, len(spans) - 1))
    span = spans[index]
    further = span._replace(start=span.start + data.draw(st.integers(1, 4000)))
    assert model.seconds(Batch([*spans[:index], further, *spans[index + 1 :]])) * slack >= before
    if span.draft is None and span.num_tokens > 1:
        longer = span._replace(num_tokens=span.num_tokens + data.draw(st.integers(1, 400)))
        assert model.seconds(Batch([*spans[:index], longer, *spans[index + 1 :]])) * slack >= before


@given(st.sampled_from(MODELS), chunks, st.floats(1, 8))
def test_a_better_device_is_never_slower(model, spans, times):
    cost = model.cost(spans).total.value
    better = [
        replace(model.device, memory_bandwidth=model.device.memory_bandwidth * times),
        replace(model.device, peaks={k: v * times for k, v in model.device.peaks.items()}),
    ]
    for machine in better:
        other = StepModel(model.model, machine, model.efficiency)
        assert other.cost(spans).total.value <= cost * (1 + 1e-12)


@given(st.sampled_from(MODELS), chunks)
def test_parts_add_up_and_lie_in_their_intervals(model, spans):
    cost = model.cost(spans)
    parts = cost.compute.value + cost.comm.value + cost.overhead.value
    assert cost.total.value == pytest.approx(parts)
    assert cost.total.low <= cost.total.value <= cost.total.high
    pp = model.model.parallel.pp
    stages = sum(op.seconds * (1 if op.name == "head" else pp) for op in cost.ops)
    assert stages == pytest.approx(cost.compute.value)
    floor = StepModel(model.model, model.device, IDEAL).cost(spans).total.value
    assert cost.total.low >= floor * (1 - 1e-12)


def test_ranks_that_share_a_matrix_read_it_faster():
    times = [
        steps(llama3_70b(parallel=Parallel(tp=tp)), "h100 sxm").cost([Span(500, 1)])
        for tp in (1, 2, 4, 8)
    ]
    computing = [cost.compute.value for cost in times]
    assert computing == sorted(computing, reverse=True)
    assert computing[0] / computing[3] < 8  # launches are as many
    talking = [cost.comm.value for cost in times]
    assert talking == sorted(talking) and talking[0] == 0.0


def test_a_step_is_priced_quickly():
    """Measured: 13 to 17 us for 64 sequences; a bound that only a gross regression breaks."""
    import timeit

    model = steps(llama_8b(), "h100 sxm")
    rng = random.Random(0)
    batch = Batch([Span(rng.randrange(4000), 1) for _ in range(64)])
    best = min(timeit.repeat(lambda: model.seconds(batch), number=50, repeat=5)) / 50
    assert best < 300e-6


# -- the roofline of each operation ---------------------------------------------------------------


def test_each_operation_beside_the_ridge_of_the_device():
    model = steps(llama_8b(), "h100 sxm")
    prefill, decode = model.cost([Span(0, 2048)]), model.cost([Span(1000, 1)] * 8)
    assert (prefill.bound, decode.bound) == ("compute", "memory")
    by_name = {op.name: op for op in prefill.ops}
    assert by_name["mlp.up"].bound == "compute" and by_name["head"].bound == "memory"
    assert by_name["mlp.up"].ridge == pytest.approx(295, rel=0.01)
    assert (
        by_name["mlp.up"].intensity > 295 > {op.name: op for op in decode.ops}["mlp.up"].intensity
    )
    document = decode.ops[0].as_json()
    assert document["bound"] == "memory" and document["flops"] > 0


def test_an_efficiency_of_ones_own():
    own = Efficiency(
        memory=0.5,
        compute=0.5,
        attention_compute=0.5,
        source="measured",
        overhead_source="interpolated",
    )
    cost = StepModel(llama_8b(), find_device("l4")[0], own).cost([Span(0, 1)])
    assert (cost.compute.source, cost.overhead.source) == ("measured", "interpolated")
    assert cost.total.low == cost.total.value == cost.total.high
