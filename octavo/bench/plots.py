"""Pictures of results, as PNG or SVG, with matplotlib (``pip install "octavo[plots]"``).

Every function takes plain numbers and returns a figure; `save` writes it. Only matplotlib's objects
are used, never pyplot, which keeps figures and settings in globals.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from octavo.errors import BenchmarkError, ConfigError
from octavo.measure.results import write_bytes
from octavo.measure.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.quality.tradeoffs import Tradeoff

FORMATS = ("png", "svg")

# Of Okabe and Ito (2008): told apart by people who see colours differently.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_INK, _PALE = "#333333", "#999999"


class _Side(NamedTuple):
    """Where the words beside a point stand, in points of type."""

    offset: tuple[float, float]
    align: Literal["left", "right"]


# Curves here rise to the right, and bend down: both sides are free.
_ABOVE, _BELOW = _Side((-6, 8), "right"), _Side((8, -14), "left")
_OVER = _Side((2, 8), "left")  # of a mark on a curve of points that are named below


def check_can_plot(paths: Iterable[str | Path]) -> None:
    """To be called before anything is measured.

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
    """ "png" or "svg", by the suffix. Raises ConfigError for another."""
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


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Of a throughput curve: requests in flight, tokens/s, and milliseconds for an output token."""

    concurrency: int
    output_tps: Spread
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None


def throughput_curve(
    points: Sequence[CurvePoint],
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
    has_tpot = all(point.tpot_p50_ms is not None for point in points)
    figure = _new_figure(title, width=11 if has_tpot else 6.5)
    panels = figure.subplots(1, 2 if has_tpot else 1, squeeze=False)[0]
    _draw_throughput(panels[0], points, knee, chosen)
    if has_tpot:
        _draw_pareto(panels[1], points, knee, chosen, tpot_bound_ms)
    return figure


def _draw_throughput(
    axes: Axes, points: Sequence[CurvePoint], knee: int | None, chosen: int | None
) -> None:
    where = [point.concurrency for point in points]
    medians = [point.output_tps.median for point in points]
    low = [point.output_tps.min for point in points]
    high = [point.output_tps.max for point in points]
    axes.fill_between(where, low, high, color=_BLUE, alpha=0.15, linewidth=0)
    axes.plot(where, medians, color=_BLUE, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(where, [str(number) for number in where])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=max(high) * 1.12)
    _label_axes(axes, "requests in flight", "output tokens/s")
    for point, place in zip(points, zip(where, medians, strict=True), strict=True):
        _mark(axes, point, place, knee, chosen, _ABOVE)


def _draw_pareto(
    axes: Axes,
    points: Sequence[CurvePoint],
    knee: int | None,
    chosen: int | None,
    bound_ms: float | None,
) -> None:
    medians = [point.output_tps.median for point in points]
    p50 = [point.tpot_p50_ms or 0.0 for point in points]
    p99 = [point.tpot_p99_ms or 0.0 for point in points]
    axes.hlines(medians, p50, p99, color=_BLUE, alpha=0.35, linewidth=2)
    axes.plot(p50, medians, color=_BLUE, marker="o", markersize=5)
    axes.set_xlim(left=0, right=max(p99) * 1.08)
    axes.set_ylim(bottom=0, top=max(medians) * 1.15)
    _label_axes(axes, "time per output token, ms (point: p50, line: to p99)", "output tokens/s")
    if bound_ms is not None and bound_ms <= axes.get_xlim()[1]:
        axes.axvline(bound_ms, color=_PALE, linestyle="--", linewidth=1)
        axes.annotate(
            f"bound {bound_ms:g} ms",
            (bound_ms, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=_PALE,
            fontsize=9,
        )
    for point, place in zip(points, zip(p50, medians, strict=True), strict=True):
        if not _mark(axes, point, place, knee, chosen, _OVER):
            _annotate(axes, str(point.concurrency), place, _PALE, _BELOW)


def _mark(
    axes: Axes,
    point: CurvePoint,
    place: tuple[float, float],
    knee: int | None,
    chosen: int | None,
    side: _Side,
) -> bool:
    """Ring a point that is the knee or the chosen one; whether it is."""
    words = [f"knee: {knee}"] if point.concurrency == knee else []
    words += [f"chosen: {chosen}"] if point.concurrency == chosen else []
    if not words:
        return False
    color = _GREEN if point.concurrency == chosen else _ORANGE
    axes.plot(*place, marker="o", markersize=11, fillstyle="none", markeredgewidth=2, color=color)
    _annotate(axes, ", ".join(words), place, color, side)
    return True


def _annotate(axes: Axes, text: str, place: tuple[float, float], color: str, side: _Side) -> None:
    axes.annotate(
        text,
        place,
        xytext=side.offset,
        textcoords="offset points",
        ha=side.align,
        color=color,
        fontsize=9,
    )


def latency_distributions(
    samples_ms: Mapping[str, Sequence[float]],
    *,
    title: str,
    bounds_ms: Mapping[str, float] | None = None,
) -> Figure:
    """For each latency, by its name, the share of values that are no larger (empirical CDF).

    The median and the 99th percentile are marked; ``bounds_ms`` are drawn as lines. What has no
    values is left out.
    """
    from octavo.measure.statistics import percentile

    shown = {name: sorted(values) for name, values in samples_ms.items() if values}
    if not shown:
        raise BenchmarkError("there is no latency to plot: no request was completed")
    figure = _new_figure(title, width=4.2 * len(shown))
    for axes, (name, values) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        shares = [(index + 1) / len(values) for index in range(len(values))]
        axes.step([values[0], *values], [0.0, *shares], where="post", color=_BLUE)
        for percent, color in ((50, _INK), (99, _ORANGE)):
            value = percentile(values, percent)
            axes.plot(value, percent / 100, marker="o", markersize=5, color=color)
            _annotate(axes, f"p{percent} {_short(value)} ms", (value, percent / 100), color, _ABOVE)
        if bounds_ms and name in bounds_ms:
            axes.axvline(bounds_ms[name], color=_PALE, linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08)
        _label_axes(axes, f"{name}, ms", "share of values")
    return figure


def time_bars(times: Mapping[str, Spread], *, title: str, unit: str) -> Figure:
    """A bar for each time, from the top down, with a line from the least to the greatest."""
    figure = _new_figure(title, width=8, height=1.2 + 0.42 * len(times))
    axes = figure.subplots()
    places = range(len(times), 0, -1)
    axes.barh(places, [time.median for time in times.values()], color=_BLUE, height=0.6)
    for place, time in zip(places, times.values(), strict=True):
        axes.plot([time.min, time.max], [place, place], color=_INK, linewidth=1)
        _name_bar(axes, f"{_short(time.median)} {unit}", time.max, place)
    axes.set_yticks(places, list(times))
    axes.set_xlim(0, 1.15 * max(time.max for time in times.values()))
    _label_axes(axes, f"{unit} (line: min to max)", "")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure


def _name_bar(axes: Axes, text: str, end: float, place: float) -> None:
    axes.annotate(
        text,
        (end, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=_INK,
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """What one optimisation is worth, and what that was measured by."""

    name: str
    figure: str
    worth: Spread


def worth_bars(bars: Sequence[Bar], *, title: str) -> Figure:
    """A bar for each optimisation, on a logarithmic axis that begins at "makes no difference"."""
    ordered = sorted(bars, key=lambda bar: bar.worth.median)
    figure = _new_figure(title, width=8, height=1.2 + 0.42 * len(ordered))
    axes = figure.subplots()
    axes.set_xscale("log")
    places = range(len(ordered))
    medians = [bar.worth.median for bar in ordered]
    colors = [_BLUE if median >= 1 else _ORANGE for median in medians]
    axes.barh(places, [median - 1 for median in medians], left=1, color=colors, height=0.6)
    for place, bar in zip(places, ordered, strict=True):
        axes.plot([bar.worth.min, bar.worth.max], [place, place], color=_INK, linewidth=1)
        _name_bar(axes, f"{_short(bar.worth.median)}×", max(bar.worth.max, 1.0), place)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.set_yticks(places, [f"{bar.name}  ({bar.figure})" for bar in ordered])
    lowest = min([1.0, *(bar.worth.min for bar in ordered)])
    highest = max([1.5, *(bar.worth.max for bar in ordered)])
    axes.set_xlim(lowest * 0.9, highest * (highest / lowest) ** 0.15)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    _label_axes(axes, "times better than without (line: min to max)", "")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure


def quantization_costs(points: Sequence[Tradeoff], *, title: str) -> Figure:
    """KL divergence against bits of a weight, and the speed of decoding against bytes.

    A model that is no different from its original is at the lower edge, and said to be.
    """
    figure = _new_figure(title, width=11)
    quality, speed = figure.subplots(1, 2)
    least = min((point.kl for point in points if point.kl > 0), default=1e-3) / 10
    for number, point in enumerate(sorted(points, key=lambda point: point.num_bytes)):
        side = _BELOW if number % 2 else _OVER  # names of neighbours, which are about as fast
        words = point.name if point.kl > 0 else f"{point.name} (KL 0)"
        _name_point(quality, words, (point.bits_per_weight, max(point.kl, least)), _OVER)
        _name_point(speed, point.name, (point.num_bytes / 2**20, point.decode_tps), side)
    quality.set_yscale("log")
    quality.margins(x=0.2, y=0.12)
    speed.axhline(points[0].base_decode_tps, color=_PALE, linestyle="--", linewidth=1)
    speed.margins(x=0.2)
    speed.set_ylim(0, 1.15 * max(points[0].base_decode_tps, *(p.decode_tps for p in points)))
    _label_axes(quality, "bits per weight, all tensors", "KL divergence from the original, nats")
    _label_axes(speed, "MiB of weights", "output tokens/s, one stream (line: the original)")
    return figure


def _name_point(axes: Axes, text: str, place: tuple[float, float], side: _Side) -> None:
    axes.plot(*place, color=_BLUE, marker="o", markersize=6)
    _annotate(axes, text, place, _INK, side)


def _short(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _new_figure(title: str, *, width: float, height: float = 4.2) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    return figure


def _label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.grid(axis="both", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """Settings that were tried: requests a second within the limits, and the largest share of a
    limit that was used. ``is_best``: nothing is better in both; ``name``: to be marked."""

    goodput: float
    strain: float
    is_best: bool = False
    name: str = ""


def tuning_pareto(points: Sequence[TunedPoint], *, title: str) -> Figure:
    """Goodput against how much of the limits latencies use; the best are joined.

    What uses a limit more than ten times over is left out. BenchmarkError if that is all.
    """
    shown = sorted((each for each in points if 0 < each.strain <= 10), key=_by_strain)
    if not shown:
        raise BenchmarkError("there is nothing to plot: no settings come near the limits")
    figure = _new_figure(title, width=7.5)
    axes = figure.subplots()
    others = [each for each in shown if not each.is_best]
    best = [each for each in shown if each.is_best]
    axes.plot(*_places(others), linestyle="", marker="o", markersize=4, color=_PALE)
    axes.plot(*_places(best), marker="o", markersize=6, color=_BLUE)
    axes.axvline(1, color=_PALE, linestyle="--", linewidth=1)
    for number, point in enumerate(each for each in shown if each.name):
        side = _BELOW if number % 2 else _OVER  # chosen settings and defaults may be neighbours
        place = (point.strain, point.goodput)
        axes.plot(*place, marker="o", markersize=11, fillstyle="none", color=_ORANGE)
        _annotate(axes, point.name, place, _ORANGE, side)
    axes.set_xscale("log")
    axes.set_xlim(shown[0].strain / 1.2, 1.2 * max(1.0, shown[-1].strain))
    _tick_shares(axes)
    axes.set_ylim(0, 1.15 * max(each.goodput for each in shown) or 1.0)
    _label_axes(
        axes, "share of the tightest limit that is used (line: all)", "requests/s within the limits"
    )
    return figure


def _tick_shares(axes: Axes) -> None:
    """In per cent, on a logarithmic axis."""
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
