"""What a meter says of steps is what whole runs are said to have done."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.stats import StepStats
from octavo.cost.hardware import Device
from octavo.cost.rank_model import AttentionOp, MatrixOp, RankModel
from octavo.cost.roofline_meter import RooflineMeter
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span, step_work

DEVICE = Device(
    name="a processor",
    kind="cpu",
    memory_bytes=64e9,
    memory_bandwidth=10e9,
    peaks={"int8": 1e12, "fp16": 0.5e12},
    is_measured=True,
)
MODEL = RankModel(
    (
        MatrixOp("matrices", 4, 0, 0, 10_000_000, 6e6, "int8"),
        MatrixOp("head", 1, 0, 0, 5_000_000, 10e6, "fp16", sampled_only=True),
    ),
    (
        AttentionOp("attention", 1, 4096.0, 2048.0),
        AttentionOp("attention.64", 3, 4096.0, 2048.0, window=64),
    ),
    1024,
    5000,
    4,
    activation_bytes=0.0,
)
STEPS = StepModel.of(MODEL, DEVICE)
SPANS = st.one_of(
    st.builds(lambda start: Span(start, 1), st.integers(0, 3000)),
    st.builds(Span, st.integers(0, 3000), st.integers(2, 500), st.integers(0, 1), st.none()),
    st.builds(Span.verifying, st.integers(0, 3000), st.integers(1, 8)),
)


def batch_of(*spans: Span, num_multi_steps: int = 1):
    return SimpleNamespace(items=spans, num_multi_steps=num_multi_steps)


def measured(batch, seconds: float, num_multi_steps: int = 1) -> dict:
    meter = RooflineMeter(STEPS)
    meter.measure(batch, num_multi_steps, seconds)
    return dict(meter.figures)


@given(st.lists(SPANS, min_size=1, max_size=8), st.integers(1, 8))
def test_the_floor_is_that_of_the_work_counted_plainly(spans, num_multi_steps):
    figures = measured(batch_of(*spans), 0.5, num_multi_steps)
    work = step_work(MODEL, spans, num_multi_steps)
    compute = work.linear.flops / 1e12 + (work.head.flops + work.attention.flops) / 0.5e12
    floor = max(work.total.bytes / 10e9, compute)
    # Of more steps than three only two are looked at, between which a window may fill.
    exact = {"rel": 1e-6 if num_multi_steps < 4 else 2e-3}
    assert figures["floor_seconds"] == pytest.approx(floor, **exact)
    assert figures["roofline_share"] == pytest.approx(floor / 0.5, **exact)
    foreseen = STEPS.seconds(batch_of(*spans, num_multi_steps=num_multi_steps))
    assert figures["predicted_seconds"] == pytest.approx(foreseen, **exact)


def bound(batch, seconds: float) -> str:
    figures = measured(batch, seconds)
    (name,) = (name for name in figures if name.endswith("_bound") and figures[name])
    return name.removeprefix("num_").removesuffix("_bound")


def test_what_bounds_a_step():
    decode, prompt = batch_of(Span(10, 1)), batch_of(Span(0, 500, 0))
    least_of_decode = measured(decode, 1.0)["floor_seconds"]
    assert least_of_decode == pytest.approx(3.4e-3, rel=0.01)  # 34 MB at 10 GB/s
    assert bound(decode, 1.1 * least_of_decode) == "memory"
    assert bound(decode, 3.0 * least_of_decode) == "overhead"
    least_of_prompt = measured(prompt, 1.0)["floor_seconds"]
    assert bound(prompt, least_of_prompt) == "compute"
    # Half of the peak is what kernels are known to reach: so far that is no overhead.
    assert bound(prompt, 2.5 * least_of_prompt) == "compute"
    assert bound(prompt, 6.0 * least_of_prompt) == "overhead"


def test_totals_grow_and_the_share_is_of_the_last_step():
    meter, step = RooflineMeter(STEPS), batch_of(Span(10, 1))
    for seconds in (0.004, 0.008):
        meter.measure(step, 1, seconds)
    figures, one = meter.figures, measured(step, 0.008)
    assert figures["floor_seconds"] == pytest.approx(2 * one["floor_seconds"])
    assert figures["predicted_seconds"] == pytest.approx(2 * one["predicted_seconds"])
    assert figures["roofline_share"] == one["roofline_share"]
    assert figures["num_memory_bound"] == figures["num_overhead_bound"] == 1


def test_its_figures_are_those_of_the_record():
    figures = measured(batch_of(Span(10, 1)), 0.01)
    record = replace(StepStats.idle(), **figures)
    unknown = {each.name for each in fields(StepStats) if each.default is None}
    others = {name for name in unknown if name.startswith(("kv_", "prefix_tokens_", "constraint"))}
    assert unknown - others == figures.keys()
    assert record.roofline_share == figures["roofline_share"]
