from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest
from svg import texts_of

from octavo.measure.statistics import MedianRange
from octavo.plots import benchmarks as plots
from octavo.plots.style import save

pytest.importorskip("matplotlib")


@dataclass
class Point:
    """A point of a sweep, as far as its plot looks at it."""

    concurrency: int
    output_tps: MedianRange
    tpot_ms: dict[int, float] = field(default_factory=dict)

    def latency_ms(self, name, percent):
        assert name == "tpot"
        return self.tpot_ms.get(percent)


CURVE = [
    Point(n, MedianRange(tps, tps * 0.9, tps * 1.1), {50: n * 2.0, 99: n * 3.0})
    for n, tps in ((1, 100), (2, 190), (4, 300), (8, 310))
]


def test_svg_says_what_is_marked(tmp_path):
    path = tmp_path / "folder" / "curve.svg"
    figure = plots.throughput_curve(
        CURVE, title="model <a> & b", knee=4, chosen=2, tpot_bound_ms=10
    )
    save(figure, path)
    texts = texts_of(path)
    for text in (
        "model <a> & b",
        "requests in flight",
        "output tokens/s",
        "knee: 4",
        "chosen: 2",
        "bound 10 ms",
    ):
        assert text in texts
    save(figure, tmp_path / "again.svg")
    assert path.read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_knee_may_be_chosen():
    figure = plots.throughput_curve(CURVE, title="", knee=4, chosen=4)
    notes = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert notes.count("knee: 4, chosen: 4") == 2


def test_curves_have_the_values():
    throughput, pareto = plots.throughput_curve(CURVE, title="").axes
    assert throughput.lines[0].get_xydata().tolist() == [[1, 100], [2, 190], [4, 300], [8, 310]]
    assert pareto.lines[0].get_xydata().tolist() == [[2, 100], [4, 190], [8, 300], [16, 310]]


def test_without_tpot_there_is_one_panel():
    points = [Point(n, MedianRange(n, n, n)) for n in (1, 2)]
    assert len(plots.throughput_curve(points, title="").axes) == 1


def test_png(tmp_path):
    path = tmp_path / "worth.PNG"
    bars = {
        "kv-cache  (tok/s)": MedianRange(20, 18, 22),
        "threads  (tok/s)": MedianRange(0.8, 0.7, 0.9),
    }
    save(plots.worth_bars(bars, title="worth"), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 100


def test_bars_begin_at_no_difference():
    bars = {"good  (x)": MedianRange(20, 18, 22), "bad  (x)": MedianRange(0.5, 0.4, 0.6)}
    (axes,) = plots.worth_bars(bars, title="").axes
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert ends == [(1, 0.5), (1, 20)]


def test_times_are_bars_from_the_top_down():
    times = {"cold": MedianRange(2.0, 1.8, 2.4), "warm": MedianRange(1.0, 0.9, 1.1)}
    figure = plots.time_bars(times, title="a start", unit="s")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cold", "warm"]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 1.0]
    assert axes.patches[0].get_y() > axes.patches[1].get_y()
    assert [text.get_text() for text in axes.texts] == ["2 s", "1 s"]
