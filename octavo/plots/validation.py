"""Plots of simulated figures beside live ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.plots.style import BLUE, INK, ORANGE, label_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.calibration.validate import ValidationRow

_LABELS = {
    "output_throughput": "output tokens/s",
    "mean_tpot_ms": "mean TPOT, ms",
    "mean_ttft_ms": "mean TTFT, ms",
    "p99_ttft_ms": "p99 TTFT, ms",
}
_WIDTH = 0.6  # of a trace's repeats together, where traces are 1 apart


def live_and_simulated(rows: Sequence[ValidationRow], *, title: str) -> Figure:
    """Plot a panel for each figure, in it for each repeat of each trace the simulated value, with
    its interval, and the live one: a ring, of another colour where it is outside of the interval.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    traces = list(dict.fromkeys(row.trace for row in rows))
    num_columns = min(2, len(metrics))
    num_rows = -(-len(metrics) // num_columns)
    width = max(4.2, 1.4 + 1.1 * len(traces)) * num_columns
    figure = new_figure(title, width=width, height=0.8 + 3.0 * num_rows)
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, metric in zip(panels.flat, metrics, strict=False):
        _draw(axes, [row for row in rows if row.metric == metric], traces)
        label_axes(axes, "", _LABELS.get(metric, metric))
        axes.grid(visible=False, axis="x")
    for axes in list(panels.flat)[len(metrics) :]:
        axes.set_visible(False)
    _explain(figure, panels[0][0])
    return figure


def _draw(axes: Axes, rows: Sequence[ValidationRow], traces: Sequence[str]) -> None:
    num_repeats = 1 + max(row.repeat for row in rows)
    for row in rows:
        place = traces.index(row.trace) + _WIDTH * ((row.repeat + 0.5) / num_repeats - 0.5)
        axes.plot([place, place], [row.low, row.high], color=BLUE, alpha=0.35, linewidth=5,
                  solid_capstyle="butt", label="simulated: interval")  # fmt: skip
        axes.plot(place, row.simulated, color=BLUE, marker="_", markersize=9, markeredgewidth=2,
                  linestyle="", label="simulated")  # fmt: skip
        axes.plot(place, row.live, color=INK if row.is_inside else ORANGE, marker="o", linestyle="",
                  markersize=6, fillstyle="none", markeredgewidth=1.6,
                  label="live, inside" if row.is_inside else "live, outside")  # fmt: skip
    axes.set_xticks(range(len(traces)), [_in_lines(trace) for trace in traces])
    axes.set_xlim(-0.6, len(traces) - 0.4)
    axes.set_ylim(0, 1.1 * max(max(row.high, row.live) for row in rows))


def _in_lines(name: str) -> str:
    """Break a name of several words into two lines."""
    words = name.split()
    middle = (len(words) + 1) // 2
    return "\n".join(" ".join(part) for part in (words[:middle], words[middle:]) if part)


def _explain(figure: Figure, axes: Axes) -> None:
    """Draw one legend for all panels, below them."""
    entries: dict[str, Artist] = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4,
                  frameon=False, fontsize=9, labelcolor=INK)  # fmt: skip
