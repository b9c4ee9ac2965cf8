"""``octavo build``, and commands that take what it has made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")


@pytest.fixture
def built(tiny_model, tmp_path, capsys) -> Path:
    out = tmp_path / "tiny engine"
    assert cli.main(["build", str(tiny_model), str(out), "--max-model-len", "96", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"out", "bytes", "elapsed_s", "sources"}
    assert document["out"] == str(out) and document["elapsed_s"] > 0
    assert document["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= document["sources"].keys()
    return out


def test_for_people(tiny_model, tmp_path, capsys):
    assert cli.main(["build", str(tiny_model), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert f"{tmp_path / 'out'}: " in shown.out and "config.json" in shown.out
    assert f"packing {tiny_model}" in shown.err


def test_what_cannot_be_is_one_line(tiny_model, tmp_path, capsys):
    assert cli.main(["build", str(tiny_model), str(tiny_model)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is not overwritten" in error
    assert cli.main(["build", str(tiny_model)]) == 2
    assert cli.main(["build", str(tiny_model), str(tmp_path / "x"), "--kernels", "reference"]) == 1
    assert "kernels 'reference'" in capsys.readouterr().err


def answer(model: Path, capsys, *flags: str) -> dict:
    command = ["generate", str(model), "--prompt", "Hello", "--max-tokens", "8", "--json", *flags]
    assert cli.main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--seed", "3"]])
def test_generate(tiny_model, built, capsys, flags):
    ours, theirs = (answer(model, capsys, *flags) for model in (built, tiny_model))
    for document in (ours, theirs):
        document["outputs"][0].pop("metrics")
    assert ours["outputs"] == theirs["outputs"]
    assert ours["engine"]["weights_bytes"] == theirs["engine"]["weights_bytes"]


def test_its_limits_hold(built, capsys):
    assert cli.main(["generate", str(built), "--prompt", "Hi", "--max-model-len", "97"]) == 1
    assert "octavo build" in capsys.readouterr().err


def test_perplexity(tiny_model, built, tmp_path, capsys):
    """To the bit: of rows of logits."""
    text, base = tmp_path / "text", tmp_path / "base"
    text.write_text("The sea is wide, and the ship is small. " * 8)
    command = ["--text", str(text), "--ctx", "64", "--json"]
    assert cli.main(["perplexity", str(tiny_model), *command, "--save-base", str(base)]) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert cli.main(["perplexity", str(built), *command[:2], "--kl-base", str(base), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours["perplexity"] == theirs["perplexity"]


def test_benchmarks(built, capsys):
    command = ["bench", "latency", str(built), "--json", "--input-len", "8", "--output-len", "4"]
    assert cli.main([*command, "--repeat", "1", "--warmup", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["kernels"] == "native"
    assert cli.main(["bench", "startup", str(built), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_token_s"] > 0
