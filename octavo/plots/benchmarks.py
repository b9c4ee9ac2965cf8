"""Plots of benchmark results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.measure.statistics import MedianRange
from octavo.plots.style import (
    ABOVE,
    BELOW,
    BLUE,
    GREEN,
    INK,
    ORANGE,
    OVER,
    PALE,
    Side,
    annotate,
    draw_bound,
    label_axes,
    label_bars,
    name_bar,
    new_figure,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.bench.offline.sweep import SweepPoint


def throughput_curve(
    points: Sequence[SweepPoint],
    *,
    title: str,
    knee: int | None = None,
    chosen: int | None = None,
    tpot_bound_ms: float | None = None,
) -> Figure:
    """Throughput against concurrency, and against TPOT where answers have one.

    Args:
        knee, chosen: concurrencies of points to mark.
        tpot_bound_ms: drawn as a line.
    """
    has_tpot = all(point.latency_ms("tpot", 50) is not None for point in points)
    figure = new_figure(title, width=11 if has_tpot else 6.5)
    panels = figure.subplots(1, 2 if has_tpot else 1, squeeze=False)[0]
    _draw_throughput(panels[0], points, knee, chosen)
    if has_tpot:
        _draw_pareto(panels[1], points, knee, chosen, tpot_bound_ms)
    return figure


def _draw_throughput(
    axes: Axes, points: Sequence[SweepPoint], knee: int | None, chosen: int | None
) -> None:
    where = [point.concurrency for point in points]
    medians = [point.output_tps.median for point in points]
    low = [point.output_tps.min for point in points]
    high = [point.output_tps.max for point in points]
    axes.fill_between(where, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(where, medians, color=BLUE, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(where, [str(number) for number in where])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=max(high) * 1.12)
    label_axes(axes, "requests in flight", "output tokens/s")
    for point, place in zip(points, zip(where, medians, strict=True), strict=True):
        _mark(axes, point, place, knee, chosen, ABOVE)


def _draw_pareto(
    axes: Axes,
    points: Sequence[SweepPoint],
    knee: int | None,
    chosen: int | None,
    bound_ms: float | None,
) -> None:
    medians = [point.output_tps.median for point in points]
    p50 = [point.latency_ms("tpot", 50) or 0.0 for point in points]
    p99 = [point.latency_ms("tpot", 99) or 0.0 for point in points]
    axes.hlines(medians, p50, p99, color=BLUE, alpha=0.35, linewidth=2)
    axes.plot(p50, medians, color=BLUE, marker="o", markersize=5)
    axes.set_xlim(left=0, right=max(p99) * 1.08)
    axes.set_ylim(bottom=0, top=max(medians) * 1.15)
    label_axes(axes, "time per output token, ms (point: p50, line: to p99)", "output tokens/s")
    if bound_ms is not None and bound_ms <= axes.get_xlim()[1]:
        draw_bound(axes, bound_ms)
    for point, place in zip(points, zip(p50, medians, strict=True), strict=True):
        if not _mark(axes, point, place, knee, chosen, OVER):
            annotate(axes, str(point.concurrency), place, PALE, BELOW)


def _mark(
    axes: Axes,
    point: SweepPoint,
    place: tuple[float, float],
    knee: int | None,
    chosen: int | None,
    side: Side,
) -> bool:
    """Ring a point that is the knee or the chosen one; return whether it is."""
    words = [f"knee: {knee}"] if point.concurrency == knee else []
    words += [f"chosen: {chosen}"] if point.concurrency == chosen else []
    if not words:
        return False
    color = GREEN if point.concurrency == chosen else ORANGE
    axes.plot(*place, marker="o", markersize=11, fillstyle="none", markeredgewidth=2, color=color)
    annotate(axes, ", ".join(words), place, color, side)
    return True


def time_bars(times: Mapping[str, MedianRange], *, title: str, unit: str) -> Figure:
    """A bar for each time, from the top down, with a line from the least to the greatest."""
    figure = new_figure(title, width=8, height=1.2 + 0.42 * len(times))
    axes = figure.subplots()
    places = range(len(times), 0, -1)
    axes.barh(places, [time.median for time in times.values()], color=BLUE, height=0.6)
    _draw_ranges(axes, places, times.values(), f" {unit}")
    axes.set_xlim(0, 1.15 * max(time.max for time in times.values()))
    label_bars(axes, places, list(times), f"{unit} (line: min to max)")
    return figure


def worth_bars(worths: Mapping[str, MedianRange], *, title: str) -> Figure:
    """A bar for each optimisation, on a logarithmic axis that begins at "makes no difference"."""
    ordered = dict(sorted(worths.items(), key=lambda named: named[1].median))
    figure = new_figure(title, width=8, height=1.2 + 0.42 * len(ordered))
    axes = figure.subplots()
    axes.set_xscale("log")
    places = range(len(ordered))
    medians = [worth.median for worth in ordered.values()]
    colors = [BLUE if median >= 1 else ORANGE for median in medians]
    axes.barh(places, [median - 1 for median in medians], left=1, color=colors, height=0.6)
    _draw_ranges(axes, places, ordered.values(), "×", least=1.0)
    axes.axvline(1, color=INK, linewidth=0.8)
    lowest = min([1.0, *(worth.min for worth in ordered.values())])
    highest = max([1.5, *(worth.max for worth in ordered.values())])
    axes.set_xlim(lowest * 0.9, highest * (highest / lowest) ** 0.15)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    label_bars(axes, places, list(ordered), "times better than without (line: min to max)")
    return figure


def _draw_ranges(
    axes: Axes, places: Iterable[int], ranges: Iterable[MedianRange], unit: str, least: float = 0.0
) -> None:
    """Draw a line over each bar, from the minimum to the maximum, and its median behind it."""
    for place, each in zip(places, ranges, strict=True):
        axes.plot([each.min, each.max], [place, place], color=INK, linewidth=1)
        name_bar(axes, f"{short(each.median)}{unit}", max(each.max, least), place)
