"""Calibrations on disk."""

from __future__ import annotations

import json

import pytest

from octavo.base.errors import ModelFileError
from octavo.calibration.store import (
    CalibrationProfile,
    find,
    folder,
    keep,
    model_and_processor,
    read,
)
from octavo.cost.measured_steps import MeasuredSteps, Spread

STEPS = MeasuredSteps(
    {"step": 1e-4, "pass": 2e-3, "rows_from_1": 0.0},
    {"decode": Spread(0.9, 1.1)},
    most_rows=512,
    most_seqs=64,
    most_keys=7000,
    drift=0.02,
    errors_of={"step": 1e-6},
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))


def profile(
    threads: int = 2, measured_at: str = "2026-01-01T00:00:00+00:00", **about
) -> CalibrationProfile:
    about = {"model": "a model.gguf", "model_bytes": 7, "threads": threads, **about}
    return CalibrationProfile(about, {"max_num_seqs": 64}, STEPS, measured_at)


def test_what_is_kept_is_found():
    path = keep(profile())
    assert path.parent == folder()
    assert read(path) == find(profile().about) == profile()


def test_of_what_is_known_the_newest_is_found():
    keep(profile(2))
    keep(profile(4, "2026-02-01T00:00:00+00:00"))
    assert find({"model": "a model.gguf"}) == profile(4, "2026-02-01T00:00:00+00:00")
    assert find({"model": "a model.gguf", "threads": 2}) == profile(2)
    assert find({"model": "another"}) is None


def test_a_new_one_takes_the_place_of_the_old_one():
    keep(profile())
    keep(profile(measured_at="2026-03-01T00:00:00+00:00"))
    assert len(list(folder().iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"schema": 2}', '{"schema": 2, "about": 3}'])
def test_damaged_files_are_errors_that_name_them_and_are_not_found(content):
    path = keep(profile())
    path.write_text(content)
    if content != "[1]":
        with pytest.raises(ModelFileError, match=r"a-model.*\.json"):
            read(path)
    assert find(profile().about) is None


def test_files_of_another_version_are_not_read():
    path = keep(profile())
    path.write_text(json.dumps({**profile().as_json(), "schema": 99}))
    assert read(path) is None
    assert find(profile().about) is None


def test_a_model_is_known_before_it_is_loaded(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1234")
    known = model_and_processor(file)
    assert (known["model"], known["model_bytes"]) == ("m.gguf", 4)
    assert model_and_processor(tmp_path)["model_bytes"] >= 4
