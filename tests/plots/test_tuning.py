from __future__ import annotations

import pytest

from octavo.base.errors import BenchmarkError
from octavo.plots.tuning import TunedPoint, tuning_pareto

pytest.importorskip("matplotlib")


def test_the_best_settings_are_joined_and_the_chosen_ones_named():
    points = [
        TunedPoint(4.0, 0.9, name="the defaults"),
        TunedPoint(6.0, 0.8, is_best=True, name="chosen"),
        TunedPoint(5.0, 0.5, is_best=True),
        TunedPoint(1.0, float("inf")),
    ]
    (axes,) = tuning_pareto(points, title="").axes
    others, best = axes.lines[:2]
    assert others.get_xydata().tolist() == [[0.9, 4.0]]
    assert best.get_xydata().tolist() == [[0.5, 5.0], [0.8, 6.0]]
    assert [text.get_text() for text in axes.texts] == ["chosen", "the defaults"]
    assert "100 %" in [label.get_text() for label in axes.get_xticklabels()]


def test_settings_that_all_failed_cannot_be_drawn():
    with pytest.raises(BenchmarkError, match="nothing to plot"):
        tuning_pareto([TunedPoint(0.0, float("inf"))], title="")
