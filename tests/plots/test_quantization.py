from __future__ import annotations

import pytest
from svg import texts_of

from octavo.plots.quantization import quantization_costs
from octavo.plots.style import save
from octavo.quality.tradeoffs import Tradeoff

pytest.importorskip("matplotlib")


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
    figure = quantization_costs(points, title="costs")
    quality, speed = figure.axes
    places = [line.get_xydata().tolist() for line in quality.lines]
    assert places == [[[6.8, 0.1]], [[9.7, 0.01]], [[32.0, 0.001]]]
    assert (quality.get_yscale(), speed.get_yscale()) == ("log", "linear")
    *models, original = [line.get_xydata().tolist() for line in speed.lines]
    assert models == [[[100, 80]], [[160, 60]], [[500, 50]]]
    assert [y for _, y in original] == [50, 50]
    save(figure, tmp_path / "costs.svg")
    assert {"costs", "four", "eight", "same (KL 0)"} <= set(texts_of(tmp_path / "costs.svg"))
