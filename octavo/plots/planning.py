"""Plots of a plan, with the use of memory, and latencies and throughput under more or less load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.cost.memory import MemoryPlan
from octavo.cost.prediction import Prediction
from octavo.measure.concurrency import powers_of_two
from octavo.planner.sizing import highest_rate
from octavo.planner.slo import Limit, Slo
from octavo.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    label_axes,
    label_bars,
    name_bar,
    new_figure,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.planner.answer import Plan
    from octavo.planner.traffic import Traffic

_GIB = 2**30
_NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "whole answer"}
# Rates, as shares of the highest one, at which the queue has no end.
_SHARES = tuple(percent / 100 for percent in (2, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95))
_MOST_AT_ONCE = 1024
_ROOM = 1.4  # above the highest value, for what is left of its interval


def plan_figure(plan: Plan, *, title: str) -> Figure:
    """Plot the memory of a device; and latencies with their intervals and limits, and throughput,
    against the rate or the concurrency. A model that does not fit has memory alone."""
    loads = _loads(plan)
    if not loads:
        figure = new_figure(title, width=8, height=2.9)
        _draw_memory(figure.subplots(), plan.deployment.memory)
        return figure
    figure = new_figure(title, width=11, height=6.8)
    top, bottom = figure.subfigures(2, 1, height_ratios=[2, 3], squeeze=False)[:, 0]
    _draw_memory(top.subplots(), plan.deployment.memory)
    metrics = [name for name in _NAMES if name != "e2e" or _limit(plan.slo, name)]
    *latencies, throughput = bottom.subplots(1, len(metrics) + 1)
    points = [_Point.of(plan, load, metrics) for load in loads]
    asked = plan.traffic.rate or plan.traffic.concurrency or 1
    for axes, metric in zip(latencies, metrics, strict=True):
        _draw_band(axes, points, [point.latency_ms[metric] for point in points], asked)
        _draw_limit(axes, _limit(plan.slo, metric))
        _label(axes, plan, f"{_NAMES[metric]}, {_of(plan.slo, metric)}, ms")
    _draw_band(throughput, points, [point.output_tps for point in points], asked)
    _label(throughput, plan, "output tokens/s, all devices")
    return figure


# -- memory ---------------------------------------------------------------------------------------


def _draw_memory(axes: Axes, memory: MemoryPlan) -> None:
    """Draw from the top down the memory, and what is taken from it, until the KV cache is
    left."""
    usable, kept_back = memory.usable_bytes, memory.kept_back_bytes
    after_weights = usable - memory.weights_bytes
    left = after_weights - kept_back
    pool = memory.kv_bytes if left >= 0 else left  # it may have been given
    rows = [
        ("reported by the device", 0, memory.total_bytes, PALE),
        ("may be used", 0, usable, PALE),
        ("weights", after_weights, usable, BLUE),
        *([("kept back for steps", left, after_weights, ORANGE)] if kept_back else []),
        ("KV cache" if left >= 0 else "missing", 0, pool, GREEN if left >= 0 else ORANGE),
    ]
    places = range(len(rows), 0, -1)
    for place, (_, begin, end, color) in zip(places, rows, strict=True):
        axes.barh(place, (end - begin) / _GIB, left=begin / _GIB, color=color, height=0.62)
        words = f"{short(abs(end - begin) / _GIB)} GiB"
        name_bar(axes, words, max(begin, end) / _GIB, place)
    axes.axvline(0, color=INK, linewidth=0.8)
    most, least = memory.total_bytes / _GIB, min(0.0, left / _GIB)
    axes.set_xlim(1.02 * least, most + 0.12 * (most - least))
    label_bars(axes, places, [name for name, *_ in rows], "memory of one device, GiB")


# -- loads ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Point:
    """Latencies and throughput of one load: a rate, or a concurrency."""

    load: float
    latency_ms: dict[str, Prediction]
    output_tps: Prediction

    @classmethod
    def of(cls, plan: Plan, traffic: Traffic, metrics: Sequence[str]) -> _Point:
        service = plan.deployment.serve(traffic)
        return cls(
            traffic.rate or traffic.concurrency or 1,
            {
                metric: service.latency(_percentile(plan.slo, metric)).of(metric) * 1e3
                for metric in metrics
            },
            service.requests_per_second * traffic.output_len,
        )


def _loads(plan: Plan) -> list[Traffic]:
    """The traffic of the plan at several rates, or concurrencies."""
    traffic, deployment = plan.traffic, plan.deployment
    if plan.verdict.service is None:
        return []
    if traffic.rate is None:
        most = min(_MOST_AT_ONCE, deployment.max_concurrency(traffic.total_len))
        counts = {*powers_of_two(most), traffic.concurrency or 1}
        return [replace(traffic, concurrency=count) for count in sorted(counts)]
    highest = highest_rate(deployment, traffic, Slo())
    rates = {highest * share for share in _SHARES}
    if plan.service is not None:  # else the rate that is asked for is beyond the highest
        rates.add(traffic.rate)
    return [replace(traffic, rate=rate) for rate in sorted(rates) if rate]


def _limit(slo: Slo, metric: str) -> Limit | None:
    """The limit that most requests must keep."""
    limits = [limit for limit in slo if limit.metric == metric]
    return max(limits, key=lambda limit: limit.percentile or 0.0, default=None)


def _percentile(slo: Slo, metric: str) -> float | None:
    limit = _limit(slo, metric)
    return None if limit is None else limit.percentile


def _of(slo: Slo, metric: str) -> str:
    percentile = _percentile(slo, metric)
    return "mean" if percentile is None else f"p{percentile:g}"


def _draw_band(
    axes: Axes, points: Sequence[_Point], figures: Sequence[Prediction], asked: float
) -> None:
    where = [point.load for point in points]
    values = [each.value for each in figures]
    top = _ROOM * max(filter(math.isfinite, values), default=1.0)
    low = [each.low for each in figures]
    high = [min(each.high, 2 * top) for each in figures]  # near the highest rate it has no end
    axes.fill_between(where, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(where, values, color=BLUE, marker="o", markersize=3.5, linewidth=1.4)
    if asked in where:
        axes.plot(
            asked,
            values[where.index(asked)],
            marker="o",
            markersize=10,
            fillstyle="none",
            markeredgewidth=2,
            color=GREEN,
        )
    axes.set_ylim(0, min(top, 1.08 * max(high)))


def _draw_limit(axes: Axes, limit: Limit | None) -> None:
    if limit is None:
        return
    bound = limit.seconds * 1e3
    axes.axhline(bound, color=ORANGE, linestyle="--", linewidth=1.2)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.15 * bound))
    axes.annotate(
        f"limit {short(bound)} ms",
        (0.02, bound),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=ORANGE,
        fontsize=9,
    )


def _label(axes: Axes, plan: Plan, figure: str) -> None:
    if plan.traffic.rate is None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        label_axes(axes, "requests at once (ring: asked for)", "")
    else:
        axes.set_xlim(left=0)
        label_axes(axes, "requests/s (ring: asked for)", "")
    axes.set_title(figure, loc="left", fontsize=10, color=INK)
