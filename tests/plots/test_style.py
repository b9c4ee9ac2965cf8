from __future__ import annotations

import importlib.util

import pytest

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.plots.style import check_can_plot


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "svg"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        check_can_plot([name])


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    with pytest.raises(BenchmarkError, match=r'pip install "octavo\[plots\]"'):
        check_can_plot(["a.png"])
    check_can_plot([])
