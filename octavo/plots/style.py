"""The style of plots, and their files: PNG or SVG, with matplotlib (``pip install
"octavo[plots]"``).

Only matplotlib's objects are used, never pyplot, which keeps figures and settings in globals.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.measure.results import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")

# Of Okabe and Ito (2008): told apart by people who see colours differently.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, PALE = "#333333", "#999999"


class Side(NamedTuple):
    """The place of a label beside a point, in points of type."""

    offset: tuple[float, float]
    align: Literal["left", "right"]


# Curves here rise to the right, and bend down: both sides are free.
ABOVE, BELOW = Side((-6, 8), "right"), Side((8, -14), "left")
OVER = Side((2, 8), "left")  # of a mark on a curve of points that are named below


def check_can_plot(paths: Iterable[str | Path]) -> None:
    """Check that plots can be written, before anything is measured.

    Raises:
        ConfigError: a suffix is no format that is written.
        BenchmarkError: matplotlib is not installed.
    """
    paths = list(paths)
    for path in paths:
        plot_format(path)
    if paths and importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError('plots need matplotlib: pip install "octavo[plots]"')


def plot_format(path: str | Path) -> str:
    """Return "png" or "svg", by the suffix. Raises ConfigError for another."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ConfigError(f"{path}: a plot is written as .png or .svg")
    return suffix


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the suffix; whole, or not at all.

    Raises:
        ConfigError: a suffix is no format that is written. BenchmarkError: it cannot be written.
    """
    import matplotlib

    kind = plot_format(path)
    content = io.BytesIO()
    # Text that can be searched, and the same file from the same numbers.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo"}):
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    write_bytes(path, content.getvalue())


def new_figure(title: str, *, width: float, height: float = 4.2) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return figure


def label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="both", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def label_bars(axes: Axes, places: Sequence[int], names: Sequence[str], x: str) -> None:
    """Label horizontal bars with names, and their axis."""
    axes.set_yticks(places, names)
    label_axes(axes, x, "")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def annotate(axes: Axes, text: str, place: tuple[float, float], color: str, side: Side) -> None:
    axes.annotate(
        text,
        place,
        xytext=side.offset,
        textcoords="offset points",
        ha=side.align,
        color=color,
        fontsize=9,
    )


def draw_bound(axes: Axes, milliseconds: float) -> None:
    """Draw a line that values should stay to the left of."""
    axes.axvline(milliseconds, color=PALE, linestyle="--", linewidth=1)
    axes.annotate(
        f"bound {milliseconds:g} ms",
        (milliseconds, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=PALE,
        fontsize=9,
    )


def name_bar(axes: Axes, text: str, end: float, place: float) -> None:
    axes.annotate(
        text,
        (end, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=INK,
    )


def short(value: float) -> str:
    """Format with three significant digits, never as a power of ten."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
