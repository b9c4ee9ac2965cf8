from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import pytest

from octavo.cli import main, train_draft
from octavo.draft_training.head_kinds import KINDS

SMALL = ["--tokens", "600", "--shortlist", "64", "--steps", "3", "--minutes", "5"]


def test_the_kinds_are_those_that_can_be_made():
    assert set(train_draft.KINDS) == set(KINDS)


def test_redrafter_is_another_name_of_the_recurrent_kind():
    parser = argparse.ArgumentParser()
    train_draft.configure(parser)
    assert parser.parse_args(["m", "out", "--kind", "redrafter"]).kind == "recurrent"


@pytest.fixture
def short_answers(monkeypatch):
    """No longer than the context of a tiny model."""
    from octavo.draft_training import training_job

    @dataclass(frozen=True, slots=True)
    class Short(training_job.TrainRequest):
        answer_tokens: int = 24

    monkeypatch.setattr(training_job, "TrainRequest", Short)


@pytest.mark.parametrize("kind", train_draft.KINDS)
def test_it_trains_heads_on_what_the_model_says(tiny_model, tmp_path, capsys, short_answers, kind):
    data = tmp_path / "data.txt"
    data.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    out = tmp_path / "head"
    args = ["train-draft", str(tiny_model), str(out), "--kind", kind, "--data", str(data)]
    assert main([*args, *SMALL, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["kind"] == kind and made["num_steps"] == 3 and made["num_tokens"] >= 600
    assert len(made["acceptance"]) == len(made["expected_tokens"]) == 3
    assert (out / "model.safetensors").is_file()
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 48
    assert main([*args, *SMALL]) == 1
    assert "exists already" in capsys.readouterr().err


def test_the_report_is_for_people(tmp_path, capsys):
    train_draft.print_made(
        {
            "out": "head",
            "kind": "recurrent",
            "num_parameters": 4_420_000,
            "num_steps": 1200,
            "num_tokens": 100_000,
            "elapsed_s": 1500.0,
            "acceptance": [0.4, 0.3],
            "expected_tokens": [1.4, 1.52],
        }
    )
    said = capsys.readouterr().out
    assert "4.4 million parameters" in said and "1 to 2: 1.40, 1.52" in said


@pytest.mark.parametrize("flags", [["--minutes", "0"], ["--minutes", "nan"], ["--kind", "tree"]])
def test_wrong_usage(tiny_model, tmp_path, capsys, flags):
    assert main(["train-draft", str(tiny_model), str(tmp_path / "head"), *flags]) == 2
    assert flags[0].removeprefix("--") in capsys.readouterr().err


def test_data_that_cannot_be_read(tiny_model, tmp_path, capsys):
    args = ["train-draft", str(tiny_model), str(tmp_path / "head"), "--data", "nowhere.txt"]
    assert main(args) == 1
    assert "nowhere.txt" in capsys.readouterr().err
