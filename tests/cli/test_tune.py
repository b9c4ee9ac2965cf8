"""``octavo tune``: elsewhere in simulation, here on a tiny model; serve starts what it wrote."""

from __future__ import annotations

import argparse
import json

import pytest

from octavo.cli import main
from octavo.cli.config_file import with_config
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.serve import _add_flags, configure
from octavo.cli.tune_report import _from_anywhere

ELSEWHERE = ["tune", "llama-3.1-8b", "--hardware", "h100-sxm", "--slo", "ttft_p99=800,tpot_p99=30",
             "--input-len", "1000", "--output-len", "16", "--num-prompts", "30",
             "--candidates", "4"]  # fmt: skip
ENGINE = ["--max-num-batched-tokens", "64", "--max-model-len", "256", "--itl-target-ms", "80"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def served_settings(path) -> tuple[str, dict]:
    """What `octavo serve --config` would start."""
    parser = argparse.ArgumentParser()
    configure(parser)
    args = with_config(parser.parse_args(["--config", str(path)]), _add_flags)
    return args.model, engine_kwargs(args)


@pytest.mark.parametrize("name", ["tuned.yaml", "tuned.toml"])
def test_elsewhere_the_search_is_all_there_is(home, capsys, name):
    flags = ["--request-rate", "5", "--max-num-seqs", "9", "--out", name, "--json"]
    assert main([*ELSEWHERE, *flags]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["best"]["max_num_seqs"] == 9  # that was given stays
    assert document["measured"] is None and document["live"] == [] and "run" not in document
    assert document["predicted"]["holds"] and document["predicted"]["tpot_p99_ms"] < 30
    assert "Nothing of this was measured live" in document["why"]
    assert {} in [each["settings"] for each in document["tried"]]
    assert any(each["pareto"] for each in document["tried"])
    assert all("threads" not in each["settings"] for each in document["tried"])
    assert served_settings(home / name) == ("llama-3.1-8b", document["best"])
    assert f"octavo serve --config {name}" in said.err


def test_models_are_written_as_they_are_found_from_any_folder(home):
    (home / "m.gguf").touch()
    (home / "smollm2-135m").mkdir()  # the alias means the model, all the same
    assert _from_anywhere("m.gguf") == str(home / "m.gguf")
    assert _from_anywhere("./smollm2-135m") == str(home / "smollm2-135m")
    assert _from_anywhere("smollm2-135m") == "smollm2-135m"
    assert _from_anywhere("org/name") == "org/name"


def test_without_a_rate_the_highest_is_looked_for(home, capsys):
    pytest.importorskip("matplotlib")
    assert main([*ELSEWHERE, "--plot", "tuned.svg", "--output", "tuned.json"]) == 0
    document = json.loads((home / "tuned.json").read_text())
    assert document["predicted"]["request_rate"] > 1
    assert "requests/s within the limits" in capsys.readouterr().out
    assert "the defaults" in (home / "tuned.svg").read_text()


def test_limits_that_nothing_meets(home, capsys):
    flags = ["--request-rate", "5", "--slo", "tpot_p50=0.1", "--json"]
    assert main([*ELSEWHERE, *flags]) == 2
    document = json.loads(capsys.readouterr().out)
    assert not document["predicted"]["holds"]
    assert "tpot_p50" in document["why"] and "does not hold" in document["why"]
    assert (home / "octavo-tuned.yaml").exists()  # the best effort


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--slo", "fast"], "'fast' is no limit"),
        (["--out", "tuned.json"], "is written as .yaml or .toml"),
        (["--threads", "2"], "--threads: a simulation of other --hardware"),
        (["--acceptance", "2"], "not a probability"),
        (["--live-seconds", "0"], "above 0"),
        (["--trace", "a", "--dataset-path", "b"], "leave one out"),
    ],
)
def test_wrong_usage_is_said_before_any_work(capsys, flags, message):
    assert main([*ELSEWHERE, *flags]) == 2
    assert message in capsys.readouterr().err


def test_here_steps_are_measured_and_the_best_is_confirmed_live(tiny_model, home, capsys):
    asked = ["tune", str(tiny_model), "--slo", "ttft_p99=2s,tpot_p99=500", "--request-rate", "20",
             "--input-len", "20", "--output-len", "6", "--num-prompts", "20", "--candidates", "2",
             "--live", "1", "--turns", "1", "--live-seconds", "0.6"]  # fmt: skip
    assert main([*asked, *ENGINE, "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert "no calibration of this engine yet: a minute" in said.err
    assert "15 seconds" in said.err and "live: the defaults" in said.err
    assert document["measured"]["holds"] and document["measured"]["goodput"] > 0
    usual = document["live"][0]
    assert usual["settings"] == {} and usual["num_requests"] >= 5
    assert usual["predicted"]["tpot_p99_ms"] > 0 < usual["measured"]["tpot_p99_ms"]
    assert document["run"]["engine"]["device"] == "cpu"
    model, settings = served_settings(home / "octavo-tuned.yaml")
    assert model == str(tiny_model) and settings == document["best"]
    # The next time, nothing is measured anew.
    assert main([*asked, *ENGINE, "--no-measure"]) == 0
    said = capsys.readouterr()
    assert "no calibration" not in said.err and "Nothing of this was measured live" in said.out
