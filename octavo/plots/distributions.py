"""Plots of empirical distributions of latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.base.errors import BenchmarkError
from octavo.measure.statistics import percentile
from octavo.plots.style import (
    ABOVE,
    BELOW,
    BLUE,
    INK,
    ORANGE,
    annotate,
    draw_bound,
    label_axes,
    new_figure,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def latency_distributions(
    samples_ms: Mapping[str, Sequence[float]],
    *,
    title: str,
    bounds_ms: Mapping[str, float] | None = None,
) -> Figure:
    """Plot for each latency, by its name, the share of values that are no larger (empirical CDF).

    The median and the 99th percentile are marked; ``bounds_ms`` are drawn as lines. Latencies
    without values are left out.
    """
    shown = {name: sorted(values) for name, values in samples_ms.items() if values}
    if not shown:
        raise BenchmarkError("there is no latency to plot: no request was completed")
    figure = new_figure(title, width=4.2 * len(shown))
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (name, values) in zip(panels, shown.items(), strict=True):
        draw_distribution(axes, name, values, (bounds_ms or {}).get(name))
    return figure


def draw_distribution(
    axes: Axes, name: str, values: Sequence[float], bound: float | None = None
) -> None:
    """One panel: values in milliseconds, in ascending order, and a bound as a line."""
    shares = [(index + 1) / len(values) for index in range(len(values))]
    axes.step([values[0], *values], [0.0, *shares], where="post", color=BLUE)
    if bound is not None:
        draw_bound(axes, bound)
    left, right = axes.get_xlim()
    for percent, color in ((50, INK), (99, ORANGE)):
        value = percentile(values, percent)
        axes.plot(value, percent / 100, marker="o", markersize=5, color=color)
        side = ABOVE if value > (left + right) / 2 else BELOW  # both are free; this one has room
        annotate(axes, f"p{percent} {short(value)} ms", (value, percent / 100), color, side)
    axes.set_ylim(0, 1.08)
    label_axes(axes, f"{name}, ms", "share of values")
