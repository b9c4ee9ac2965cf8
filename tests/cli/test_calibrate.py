"""``octavo calibrate`` and ``octavo validate`` on a tiny model."""

from __future__ import annotations

import json

import pytest
from svg import texts_of

from octavo.calibration import calibration_run
from octavo.cli import main

ENGINE = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def measured_once():
    """``calibrate`` that measures the first time, and finds the same from then on."""
    calibrate, found = calibration_run.calibrate, []

    def once(*args, **settings):
        if not found:
            found.append(calibrate(*args, **settings))
        return found[0]

    return once


@pytest.fixture(autouse=True)
def _measured_once(measured_once, monkeypatch):
    monkeypatch.setattr(calibration_run, "calibrate", measured_once)


@pytest.fixture
def trace(tmp_path):
    lines = [
        {"timestamp": 40 * n, "input_length": 20, "output_length": 4, "hash_ids": [n]}
        for n in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_calibration_is_kept_and_told(tiny_model, home, capsys):
    assert main(["calibrate", str(tiny_model), "--quick", "--json", *ENGINE]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"].startswith(str(home / "calibrations"))
    assert document["engine"]["max_num_seqs"] == 4
    assert document["steps"]["most_rows"] == 64
    assert document["run"]["settings"]["benchmark"] == "calibrate"
    assert main(["calibrate", str(tiny_model), "--quick", *ENGINE]) == 0
    said = capsys.readouterr().out
    assert "one request decodes" in said and "kept in" in said


def test_what_is_foreseen_beside_what_comes(tiny_model, home, trace, capsys):
    asked = ["validate", str(tiny_model), "--trace", str(trace), "--repeats", "2", *ENGINE]
    assert main([*asked, "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert "no calibration of this engine yet" in said.err
    assert len(document["rows"]) == 2 * 4
    keys = {"trace", "repeat", "metric", "live", "simulated", "error", "low", "high", "inside"}
    keys |= {"as_calibrated", "error_as_calibrated"}
    assert set(document["rows"][0]) == keys
    assert set(document["summary"]["mean_ttft_ms"]) == {
        *("mean_abs_error", "max_abs_error", "inside_interval", "mean_abs_error_as_calibrated")
    }
    picture = home.parent / "validation.svg"
    assert main([*asked, "--plot", str(picture)]) == 0  # with the calibration of before
    said = capsys.readouterr()
    assert "no calibration" not in said.err and "output_throughput" in said.out
    assert {"mean TTFT, ms", "simulated: interval"} <= set(texts_of(picture))


def test_requests_need_a_time(tiny_model, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text("{}")
    asked = ["validate", str(tiny_model), "--trace", str(tmp_path / "bad.jsonl"), *ENGINE]
    assert main(asked) == 1
    assert "bad.jsonl" in capsys.readouterr().err
