"""Plots of the settings that were tried for a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.base.errors import BenchmarkError
from octavo.plots.style import BELOW, BLUE, ORANGE, OVER, PALE, annotate, label_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """Settings that were tried: requests per second within the limits, and the largest share of a
    limit that was used. ``is_best``: no other is better in both; ``name``: a label."""

    goodput: float
    strain: float
    is_best: bool = False
    name: str = ""


def tuning_pareto(points: Sequence[TunedPoint], *, title: str) -> Figure:
    """Plot goodput against the share of the limits that latencies use; the best are joined.

    Points that use a limit more than ten times over are left out. BenchmarkError if that is all.
    """
    shown = sorted((each for each in points if 0 < each.strain <= 10), key=_by_strain)
    if not shown:
        raise BenchmarkError("there is nothing to plot: no settings come near the limits")
    figure = new_figure(title, width=7.5)
    axes = figure.subplots()
    others = [each for each in shown if not each.is_best]
    best = [each for each in shown if each.is_best]
    axes.plot(*_places(others), linestyle="", marker="o", markersize=4, color=PALE)
    axes.plot(*_places(best), marker="o", markersize=6, color=BLUE)
    axes.axvline(1, color=PALE, linestyle="--", linewidth=1)
    for number, point in enumerate(each for each in shown if each.name):
        side = BELOW if number % 2 else OVER  # chosen settings and defaults may be neighbours
        place = (point.strain, point.goodput)
        axes.plot(*place, marker="o", markersize=11, fillstyle="none", color=ORANGE)
        annotate(axes, point.name, place, ORANGE, side)
    axes.set_xscale("log")
    axes.set_xlim(shown[0].strain / 1.2, 1.2 * max(1.0, shown[-1].strain))
    _tick_shares(axes)
    axes.set_ylim(0, 1.15 * max(each.goodput for each in shown) or 1.0)
    label_axes(
        axes, "share of the tightest limit that is used (line: all)", "requests/s within the limits"
    )
    return figure


def _tick_shares(axes: Axes) -> None:
    """Label a logarithmic axis in per cent."""
    low, high = axes.get_xlim()
    shares = [
        share * scale for scale in (0.001, 0.01, 0.1, 1, 10) for share in (1, 1.5, 2, 3, 5, 7)
    ]
    ticks = [share for share in shares if low <= share <= high]
    axes.set_xticks(ticks, [f"{tick * 100:g} %" for tick in ticks])
    axes.minorticks_off()


def _by_strain(point: TunedPoint) -> tuple[float, float]:
    return point.strain, point.goodput


def _places(points: Sequence[TunedPoint]) -> tuple[list[float], list[float]]:
    return [each.strain for each in points], [each.goodput for each in points]
