from __future__ import annotations

import pytest

from octavo.base.errors import BenchmarkError
from octavo.plots.distributions import latency_distributions

pytest.importorskip("matplotlib")


def test_distributions_reach_all_values():
    figure = latency_distributions(
        {"TTFT": [3.0, 1.0, 2.0], "E2E": []}, title="", bounds_ms={"TTFT": 2.5}
    )
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 0], [1, 1 / 3], [2, 2 / 3], [3, 1]]
    assert axes.get_xlabel() == "TTFT, ms"
    with pytest.raises(BenchmarkError, match="no latency"):
        latency_distributions({"TTFT": []}, title="")


def test_what_is_said_of_a_value_stands_where_there_is_room():
    (axes,) = latency_distributions({"TTFT": [*[1.0] * 90, *[1000.0] * 10]}, title="").axes
    sides = {text.get_text(): text.get_ha() for text in axes.texts}
    assert sides == {"p50 1 ms": "left", "p99 1000 ms": "right"}
