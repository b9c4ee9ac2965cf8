from __future__ import annotations

import importlib.util
import struct
from xml.etree import ElementTree

import pytest

from octavo.bench import plots
from octavo.errors import BenchmarkError, ConfigError
from octavo.measure.statistics import Spread
from octavo.quality.tradeoffs import Tradeoff

pytest.importorskip("matplotlib")

CURVE = [
    plots.CurvePoint(n, Spread(tps, tps * 0.9, tps * 1.1), n * 2.0, n * 3.0)
    for n, tps in ((1, 100), (2, 190), (4, 300), (8, 310))
]


def texts_of(path):
    return [element.text for element in ElementTree.parse(path).iter() if element.text]


def test_svg_says_what_is_marked(tmp_path):
    path = tmp_path / "folder" / "curve.svg"
    figure = plots.throughput_curve(
        CURVE, title="model <a> & b", knee=4, chosen=2, tpot_bound_ms=10
    )
    plots.save(figure, path)
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
    plots.save(figure, tmp_path / "again.svg")
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
    points = [plots.CurvePoint(n, Spread(n, n, n)) for n in (1, 2)]
    assert len(plots.throughput_curve(points, title="").axes) == 1


def test_png(tmp_path):
    path = tmp_path / "worth.PNG"
    bars = [
        plots.Bar("kv-cache", "tok/s", Spread(20, 18, 22)),
        plots.Bar("threads", "tok/s", Spread(0.8, 0.7, 0.9)),
    ]
    plots.save(plots.worth_bars(bars, title="worth"), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 100


def test_bars_begin_at_no_difference():
    bars = [
        plots.Bar("good", "x", Spread(20, 18, 22)),
        plots.Bar("bad", "x", Spread(0.5, 0.4, 0.6)),
    ]
    (axes,) = plots.worth_bars(bars, title="").axes
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert ends == [(1, 0.5), (1, 20)]


def test_distributions_reach_all_values():
    figure = plots.latency_distributions(
        {"TTFT": [3.0, 1.0, 2.0], "E2E": []}, title="", bounds_ms={"TTFT": 2.5}
    )
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 0], [1, 1 / 3], [2, 2 / 3], [3, 1]]
    assert axes.get_xlabel() == "TTFT, ms"
    with pytest.raises(BenchmarkError, match="no latency"):
        plots.latency_distributions({"TTFT": []}, title="")


def test_quantized_models_are_points(tmp_path):
    """With their names; one without any loss stands at the lower edge of a logarithmic axis."""
    points = [
        Tradeoff(name, "gptq", "gptq", bits, size << 20, kl, 29.5, 27.0, tps, 50.0, "a text", 3072)
        for name, bits, size, kl, tps in (
            ("four", 6.8, 100, 0.1, 80.0),
            ("eight", 9.7, 160, 0.01, 60.0),
            ("same", 32.0, 500, 0.0, 50.0),
        )
    ]
    figure = plots.quantization_costs(points, title="costs")
    quality, speed = figure.axes
    places = [line.get_xydata().tolist() for line in quality.lines]
    assert places == [[[6.8, 0.1]], [[9.7, 0.01]], [[32.0, 0.001]]]
    assert (quality.get_yscale(), speed.get_yscale()) == ("log", "linear")
    *models, original = [line.get_xydata().tolist() for line in speed.lines]
    assert models == [[[100, 80]], [[160, 60]], [[500, 50]]]
    assert [y for _, y in original] == [50, 50]
    plots.save(figure, tmp_path / "costs.svg")
    assert {"costs", "four", "eight", "same (KL 0)"} <= set(texts_of(tmp_path / "costs.svg"))


def test_the_best_settings_are_joined_and_the_chosen_ones_named():
    points = [
        plots.TunedPoint(4.0, 0.9, name="the defaults"),
        plots.TunedPoint(6.0, 0.8, is_best=True, name="chosen"),
        plots.TunedPoint(5.0, 0.5, is_best=True),
        plots.TunedPoint(1.0, float("inf")),
    ]
    (axes,) = plots.tuning_pareto(points, title="").axes
    others, best = axes.lines[:2]
    assert others.get_xydata().tolist() == [[0.9, 4.0]]
    assert best.get_xydata().tolist() == [[0.5, 5.0], [0.8, 6.0]]
    assert [text.get_text() for text in axes.texts] == ["chosen", "the defaults"]
    assert "100 %" in [label.get_text() for label in axes.get_xticklabels()]


def test_settings_that_all_failed_cannot_be_drawn():
    with pytest.raises(BenchmarkError, match="nothing to plot"):
        plots.tuning_pareto([plots.TunedPoint(0.0, float("inf"))], title="")


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "svg"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plots.check_can_plot([name])


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    with pytest.raises(BenchmarkError, match=r'pip install "octavo\[plots\]"'):
        plots.check_can_plot(["a.png"])
    plots.check_can_plot([])


def test_times_are_bars_from_the_top_down():
    times = {"cold": Spread(2.0, 1.8, 2.4), "warm": Spread(1.0, 0.9, 1.1)}
    figure = plots.time_bars(times, title="a start", unit="s")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cold", "warm"]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 1.0]
    assert axes.patches[0].get_y() > axes.patches[1].get_y()
    assert [text.get_text() for text in axes.texts] == ["2 s", "1 s"]
