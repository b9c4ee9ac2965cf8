from __future__ import annotations

import pytest

from octavo.planner.answer import plan
from octavo.planner.traffic import Traffic
from octavo.plots.planning import plan_figure
from octavo.plots.style import save

pytest.importorskip("matplotlib")

_GIB = 2**30


def spans(axes):
    """(begin, end) of each bar, in bytes, from the top down."""
    return [
        (round(bar.get_x() * _GIB), round((bar.get_x() + bar.get_width()) * _GIB))
        for bar in axes.patches
    ]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_what_is_taken_from_memory_leaves_that_of_keys_and_values():
    planned = plan("qwen3-32b", "h100-sxm", Traffic(1024, 256, concurrency=8), engine="vllm")
    memory = planned.deployment.memory
    axes = plan_figure(planned, title="").axes[0]
    total, usable, weights, kept_back, kv = spans(axes)
    assert names(axes)[2:] == ["weights", "kept back for steps", "KV cache"]
    assert (total[1], usable[1]) == (memory.total_bytes, memory.usable_bytes)
    assert weights == (usable[1] - memory.weights_bytes, usable[1])
    assert kept_back == (weights[0] - memory.kept_back_bytes, weights[0])
    assert kv == (0, memory.kv_bytes) and kv[1] == pytest.approx(kept_back[0], rel=1e-3)


def test_what_does_not_fit_says_what_is_missing():
    planned = plan("llama-3.3-70b", "rtx4090")
    (axes,) = plan_figure(planned, title="").axes
    *_, missing = spans(axes)
    assert names(axes)[-1] == "missing"
    assert missing == (0, pytest.approx(planned.deployment.memory.left_bytes)) and missing[1] < 0


def test_latencies_are_drawn_against_the_rate_with_their_limits(tmp_path):
    traffic = Traffic(512, 128, rate=5.0)
    planned = plan("llama-3.3-70b", "h100-sxm:4", traffic, slo="ttft=500,tpot_mean=50,e2e=20s@p90")
    figure = plan_figure(planned, title="70b")
    _, *panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "time to first token, p90, ms",
        "time per output token, mean, ms",
        "whole answer, p90, ms",
        "output tokens/s, all devices",
    ]
    ttft, tpot, _, output = panels
    curve, asked, limit = ttft.lines
    assert (
        asked.get_xydata().tolist() == [[5.0, planned.service.latency(90.0).ttft.value * 1e3]]
        and asked.get_xydata().tolist()[0] in curve.get_xydata().tolist()
    )
    assert limit.get_ydata() == [500, 500] and tpot.lines[2].get_ydata() == [50, 50]
    rates = curve.get_xdata().tolist()
    assert rates == sorted(rates) and rates[-1] > 10
    assert [y / x for x, y in output.lines[0].get_xydata()] == pytest.approx([128] * len(rates))
    save(figure, tmp_path / "plan.png")  # near the highest rate an interval has no end


def test_or_against_how_many_there_are():
    planned = plan("llama-3.1-8b", "rtx4090", Traffic(1024, 256, concurrency=6))
    *_, output = plan_figure(planned, title="").axes
    counts = output.lines[0].get_xdata().tolist()
    most = planned.deployment.max_concurrency(1280)
    assert counts == [*(n for n in (1, 2, 4, 6, 8, 16, 32, 64) if n < most), most]
    throughput = output.lines[0].get_ydata().tolist()
    assert throughput == sorted(throughput)
    assert output.lines[1].get_xdata().tolist() == [6]


def test_a_rate_that_is_too_high_is_not_among_those_that_are_drawn():
    planned = plan("llama-3.1-8b", "rtx4090", Traffic(1024, 256, rate=500.0))
    *_, output = plan_figure(planned, title="").axes
    assert len(output.lines) == 1 and max(output.lines[0].get_xdata()) < 500
