"""Starts of processes: that the right moments are taken, and nothing of the user's is touched."""

from __future__ import annotations

import json
import os

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench import record
from octavo.bench.noise import NoiseProbe
from octavo.bench.offline import startup
from octavo.bench.offline.startup import (
    Start,
    StartupPlan,
    measure_startup,
    model_files,
    start_once,
)
from octavo.kernels.cpu.library import runnable

PHASES = ("import", "header", "tokenizer", "weights", "program")


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    """The probes of the machine have tests of their own."""
    monkeypatch.setattr(record, "probe_machine", lambda threads: NoiseProbe(30.0, 200.0))


def test_a_start_of_a_model(tiny_model, tmp_path):
    arguments = {"model": str(tiny_model), "threads": 1}
    start, engine = start_once(arguments, {"OCTAVO_PACKED_DIR": str(tmp_path)})
    phases = [getattr(start, f"{name}_s") for name in PHASES]
    assert min(phases) > 0 and sum(phases) == pytest.approx(start.ready_s)
    assert start.ready_s + start.answer_s == pytest.approx(start.first_token_s)
    assert start.peak_rss_bytes > 50 * 2**20
    assert engine["device"] in ("cpu", "cuda:0", "cuda")
    if runnable() and engine["device"] == "cpu":  # packed there, and not beside the model
        assert len(list(tmp_path.glob("*.v16"))) == 1


def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(BenchmarkError, match=r"a start failed: .*no file or folder"):
        start_once({"model": str(tmp_path / "nowhere.gguf")})


@pytest.fixture
def starts(monkeypatch):
    """Scripted starts: what each was given."""
    given, times = [], iter(range(1, 100))

    def start_once(arguments, variables=None):
        packed = (variables or {}).get("OCTAVO_PACKED_DIR")
        given.append((arguments, packed, packed is None or os.listdir(packed)))
        seconds = float(next(times))
        return Start(seconds, seconds + 0.5, *[0.1] * 6, 1000), {"device": "cpu"}

    monkeypatch.setattr(startup, "start_once", start_once)
    return given


def test_cold_and_warm_by_hand(starts, tiny_model, monkeypatch):
    dropped, calls = [], []
    monkeypatch.setattr(startup, "drop_from_memory", dropped.append)
    result = measure_startup(
        str(tiny_model), {"threads": 2}, StartupPlan(2, 3), {"a": 1}, lambda: calls.append(1)
    )
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    # The first start (1 s) does not count.
    assert document["warm_startup_times"] == [2, 3, 4] and document["warm_s"] == 3
    assert document["cold_startup_times"] == [5, 6] and document["cold_s"] == 5.5
    assert document["first_token_s"] == 3.5
    assert document["cold"]["first_token_s"] == {"median": 6.0, "min": 5.5, "max": 6.5}
    assert document["avg_cold_startup_time"] == 5.5 and document["avg_warm_startup_time"] == 3
    assert "packed" in document["warm"]["means"] and "packed" in document["cold"]["means"]
    assert document["run"]["samples"]["cold"]["ready_s"] == [5, 6]
    assert document["run"]["settings"] == {"a": 1} and document["run"]["threads"] == 2
    assert document["engine"] == document["run"]["engine"] == {"device": "cpu"}
    assert len(calls) == 6
    assert all(arguments == {"threads": 2, "model": str(tiny_model)} for arguments, *_ in starts)
    # Warm ones use what is there; a cold one has a folder of its own, empty, and gone afterwards.
    folders = [packed for _, packed, _ in starts]
    assert folders[:4] == [None] * 4 and None not in folders[4:]
    assert folders[4] != folders[5] and not any(os.path.exists(folder) for folder in folders[4:])
    assert [content for *_, content in starts[4:]] == [[], []]
    assert dropped == [model_files(tiny_model)] * 2


def test_files_of_a_model(tmp_path, tiny_model):
    assert tiny_model / "model.safetensors" in model_files(tiny_model)
    assert all(path.is_file() for path in model_files(tiny_model))
    parts = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    for path in (*parts, tmp_path / "m.gguf"):
        path.write_bytes(b"x")
    assert model_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    assert model_files(parts[0]) == parts


def test_dropping_keeps_the_files(tiny_model):
    path = tiny_model / "model.safetensors"
    before = path.read_bytes()
    startup.drop_from_memory([path])
    assert path.read_bytes() == before
