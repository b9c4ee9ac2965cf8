"""Plots of a simulated run, with engines over time and latencies of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.plots.distributions import draw_distribution
from octavo.plots.style import BLUE, GREEN, INK, ORANGE, label_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from octavo.sim.timeline import SeriesPoint


def run_over_time(
    points: Sequence[SeriesPoint],
    samples_ms: Mapping[str, Sequence[float]],
    *,
    title: str,
    bounds_ms: Mapping[str, float] | None = None,
) -> Figure:
    """Plot requests, the KV pool and tokens over time, and beside them the distribution of each
    latency that has values."""
    shown = {name: sorted(values) for name, values in samples_ms.items() if values}
    figure = new_figure(title, width=11 if shown else 7, height=7.6)
    if not shown:
        _draw_over_time(figure, points)
        return figure
    left, right = figure.subfigures(1, 2, width_ratios=[3, 2], squeeze=False)[0]
    _draw_over_time(left, points)
    panels = right.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (name, values) in zip(panels, shown.items(), strict=True):
        draw_distribution(axes, name, values, (bounds_ms or {}).get(name))
    return figure


def _draw_over_time(figure: FigureBase, points: Sequence[SeriesPoint]) -> None:
    panels = figure.subplots(4, 1, sharex=True)
    _draw_requests(panels[0], points)
    _draw_pool(panels[1], points)
    _draw_rate(panels[2], points, [point.computed_tps for point in points], "tokens computed/s")
    _draw_rate(panels[3], points, [point.output_tps for point in points], "output tokens/s")
    panels[3].set_xlabel("time, s")
    figure.align_ylabels(panels)


def _draw_requests(axes: Axes, points: Sequence[SeriesPoint]) -> None:
    times = [point.time_s for point in points]
    running, waiting = [p.running for p in points], [p.waiting for p in points]
    axes.plot(times, running, color=BLUE, linewidth=1.2, label="running")
    axes.plot(times, waiting, color=ORANGE, linewidth=1.2, label="waiting")
    axes.set_ylim(0, 1.25 * max(1.0, *running, *waiting))  # room for the legend
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    label_axes(axes, "", "requests")


def _draw_pool(axes: Axes, points: Sequence[SeriesPoint]) -> None:
    times, shares = [p.time_s for p in points], [100 * p.kv_use for p in points]
    axes.fill_between(times, shares, color=GREEN, alpha=0.25, linewidth=0)
    axes.plot(times, shares, color=GREEN, linewidth=1.2)
    axes.set_ylim(0, 105)
    label_axes(axes, "", "KV pool in use, %")


def _draw_rate(
    axes: Axes, points: Sequence[SeriesPoint], rates: Sequence[float], name: str
) -> None:
    axes.plot([point.time_s for point in points], rates, color=BLUE, linewidth=1.2)
    axes.set_ylim(0, 1.1 * max(1.0, *rates))
    label_axes(axes, "", name)
