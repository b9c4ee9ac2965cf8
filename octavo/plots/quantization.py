"""Plots of the quality, size and speed of quantized models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.plots.style import BELOW, BLUE, INK, OVER, PALE, Side, annotate, label_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octavo.quality.tradeoffs import Tradeoff


def quantization_costs(points: Sequence[Tradeoff], *, title: str) -> Figure:
    """Plot KL divergence against bits per weight, and the speed of decoding against bytes.

    A model with no divergence from its original is at the lower edge, and labelled so.
    """
    figure = new_figure(title, width=11)
    quality, speed = figure.subplots(1, 2)
    least = min((point.kl for point in points if point.kl > 0), default=1e-3) / 10
    for number, point in enumerate(sorted(points, key=lambda point: point.num_bytes)):
        side = BELOW if number % 2 else OVER  # names of neighbours, which are about as fast
        words = point.name if point.kl > 0 else f"{point.name} (KL 0)"
        _name_point(quality, words, (point.bits_per_weight, max(point.kl, least)), OVER)
        _name_point(speed, point.name, (point.num_bytes / 2**20, point.decode_tps), side)
    quality.set_yscale("log")
    quality.margins(x=0.2, y=0.12)
    speed.axhline(points[0].base_decode_tps, color=PALE, linestyle="--", linewidth=1)
    speed.margins(x=0.2)
    speed.set_ylim(0, 1.15 * max(points[0].base_decode_tps, *(p.decode_tps for p in points)))
    label_axes(quality, "bits per weight, all tensors", "KL divergence from the original, nats")
    label_axes(speed, "MiB of weights", "output tokens/s, one stream (line: the original)")
    return figure


def _name_point(axes: Axes, text: str, place: tuple[float, float], side: Side) -> None:
    axes.plot(*place, color=BLUE, marker="o", markersize=6)
    annotate(axes, text, place, INK, side)
