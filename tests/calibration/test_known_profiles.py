"""Which calibration holds for a model that nobody has loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.calibration.known_profiles import profile_here
from octavo.calibration.store import CalibrationProfile, keep, model_and_processor
from octavo.cost.measured_steps import MeasuredSteps, Spread

STEPS = MeasuredSteps({"pass": 1e-3}, {"decode": Spread(1.0, 1.0)}, 1, 1, 1)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"12345")
    return path


def test_the_newest_of_this_model_and_processor(model):
    assert profile_here(str(model)) is None
    about = model_and_processor(model)
    old = CalibrationProfile({**about, "threads": 2}, {}, STEPS, "2026-01-01T00:00:00+00:00")
    new = CalibrationProfile({**about, "threads": 1}, {}, STEPS, "2026-01-02T00:00:00+00:00")
    for profile in (new, old, replace(new, about={**about, "processor": "another"})):
        keep(profile)
    assert profile_here(str(model)) == new
    model.write_bytes(b"another file of this name")
    assert profile_here(str(model)) is None


def test_a_model_that_is_not_here_has_none(model):
    assert profile_here("llama-3.1-8b") is None
