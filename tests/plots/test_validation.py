from __future__ import annotations

import pytest
from svg import texts_of

from octavo.calibration.validate import ValidationRow
from octavo.plots.style import ORANGE, save
from octavo.plots.validation import live_and_simulated

pytest.importorskip("matplotlib")

ROWS = [
    ValidationRow(trace, repeat, metric, live, 100.0, 90.0, 110.0, 100.0)
    for trace in ("half of capacity", "bursts")
    for metric in ("output_throughput", "mean_tpot_ms", "p99_ttft_ms")
    for repeat, live in enumerate((95.0, 120.0))
]


def test_a_panel_for_each_figure(tmp_path):
    path = tmp_path / "validation.svg"
    figure = live_and_simulated(ROWS, title="a model")
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]
    save(figure, path)
    texts = set(texts_of(path))
    assert {"a model", "output tokens/s", "mean TPOT, ms", "p99 TTFT, ms", "half of"} <= texts
    assert {"simulated", "simulated: interval", "live, inside", "live, outside"} <= texts


def test_repeats_stand_beside_each_other_each_with_its_interval():
    axes = live_and_simulated(ROWS, title="").axes[0]
    intervals, simulated, live = axes.lines[::3], axes.lines[1::3], axes.lines[2::3]
    places = [line.get_xdata()[0] for line in live]
    assert places == pytest.approx([-0.15, 0.15, 0.85, 1.15])
    assert all(list(line.get_ydata()) == [90.0, 110.0] for line in intervals)
    assert [list(line.get_ydata()) for line in simulated] == [[100.0]] * 4
    assert [line.get_ydata()[0] for line in live] == [95.0, 120.0] * 2
    assert [line.get_color() == ORANGE for line in live] == [False, True] * 2
