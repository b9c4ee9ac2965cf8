"""``octavo calibrate`` and ``octavo validate`` on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


def test_the_loopback_is_measured_and_kept(home, capsys):
    pytest.importorskip("cryptography", reason="connections between machines need certificates")
    assert main(["calibrate", "--link", "loopback", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "loopback"
    assert 0 < document["latency_s"] <= document["latency_p99_s"]
    assert json.loads((home / "calibrations" / "link-loopback.json").read_text()).items() <= (
        document.items()
    )


def test_two_machines_measure_their_link_by_a_ticket(home, capsys, monkeypatch):
    pytest.importorskip("cryptography", reason="connections between machines need certificates")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    listen = [sys.executable, "-m", "octavo", "calibrate", "--link", "listen"]
    with subprocess.Popen(
        [*listen, "--link-address", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        monkeypatch.setenv("OCTAVO_LINK_TICKET", other.stdout.readline())
        assert main(["calibrate", "--link", "connect"]) == 0
        assert "has measured the link" in other.communicate()[1]
        assert other.returncode == 0
    said = capsys.readouterr().out
    assert "the link to 127.0.0.1, one way" in said and "GB/s" in said
    assert (home / "calibrations" / "link-127.0.0.1.json").is_file()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["some-model", "--link", "loopback"], "leave out MODEL"),
        (["--link", "loopback", "--threads", "2"], "leave out --threads"),
        (["--link", "listen", "--quick"], "leave out --quick"),
        (["--link", "connect", "--link-address", "a"], "not of --link connect"),
        (["--link-address", "a"], "--link-address is of --link listen"),
        (["--link", "listen", "--link-address", "a:b"], "is no address"),
    ],
)
def test_flags_of_links_that_do_not_fit_are_refused(flags, why, capsys):
    assert main(["calibrate", *flags]) != 0
    assert why in capsys.readouterr().err


def test_without_a_ticket_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_LINK_TICKET", "no ticket")
    assert main(["calibrate", "--link", "connect"]) == 1
    assert "HOST:PORT/FINGERPRINT/TOKEN" in capsys.readouterr().err
