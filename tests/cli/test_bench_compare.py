"""`octavo bench compare`: what may be asked for, and the table."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from octavo import cli
from octavo.bench.peers import compare as library
from octavo.bench.peers import contenders, report
from octavo.bench.peers.workers.workloads import WORKLOADS, batch_figures
from octavo.cli.bench import compare


def result_of(measured, weights):
    engines = {name: {"weights": kind} for name, kind in weights.items()}
    ours = [name for name in engines if name.startswith("octavo:")]
    rows = report.summarize(measured, ours)
    run = {
        "date": "2026-01-02",
        "versions": {"octavo": "0.1"},
        "machine": {"cpu": {"model": "a processor"}, "gpus": []},
        "threads": 2,
        "noise": {"before": None},
        "engine": None,
        "warnings": ["a neighbour is loud"],
    }
    return library.ComparisonResult(rows, engines, {}, {}, run)


@pytest.fixture
def batch_result():
    figures = batch_figures(WORKLOADS["batch-32"], whole_s=10.0, prefill_s=2.0)
    twice = {name: 2 * value for name, value in figures.items()}
    measured = [
        report.TurnSample(0, "batch-32", "octavo:file", [twice]),
        report.TurnSample(0, "batch-32", "llama.cpp:q4_0", [figures]),
    ]
    weights = {"octavo:file": "q4_1", "octavo:bf16": "bf16", "llama.cpp:q4_0": "q4_0"}
    return result_of(measured, weights)


def test_the_table_shows_every_figure_once(batch_result):
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=160).print(compare.create_table(batch_result))
    shown = text.getvalue()
    assert shown.count("32 × (128 in, 128 out)") == 1
    assert shown.count("decode tokens/s") == 1 and "409.6" in shown and "819.2" in shown
    assert shown.count("2.00 ×") == 3
    assert "octavo q4_1 is faster by" in " ".join(shown.split()) and "bf16" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "lama"], "unknown engine 'lama'"),
        (["--octavo-weights", "q8"], "unknown engine 'octavo:q8'"),
        (["--workloads", "decode,encode"], "unknown workload 'encode'"),
        (["--workloads", ","], "at least one"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_done(arguments, message, capsys):
    assert cli.main(["bench", "compare", "no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_cannot_be_compared(tiny_model, capsys):
    assert cli.main(["bench", "compare", str(tiny_model), "--peers", ""]) == 1
    assert "starts from a .gguf file" in capsys.readouterr().err


def test_that_there_is_nothing_to_compare_with_is_said_before_a_model_is_fetched(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(contenders, "find_spec", lambda package: None)
    arguments = ["--peers", "llama.cpp,vllm,transformers", "--dir", str(tmp_path / "none")]
    assert cli.main(["bench", "compare", "no-such-model", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing to compare octavo with" in line and "../" not in line
    assert all(line.count(f"{name}: ") == 1 for name in ("llama.cpp", "vllm", "transformers"))


@pytest.fixture
def asked(monkeypatch, tmp_path, batch_result):
    """What the library was asked for."""
    seen = []

    def fake(plan, settings, log):
        seen.append((plan, settings))
        return batch_result

    monkeypatch.setattr(library, "compare", fake)
    monkeypatch.setattr(contenders, "how_to_install", lambda engine, folder: None)
    (tmp_path / "model.Q4_1.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return seen


def test_flags_reach_the_comparison(asked, tmp_path, capsys):
    arguments = ["--peers", "llama.cpp:q4_0,vllm", "--octavo-weights", "file", "--rounds", "2"]
    arguments += ["--workloads", "prefill,decode,prefill", "--dir", "there", "--threads", "1"]
    arguments += ["--kv-cache-dtype", "bf16", "--json", "--output", "out.json"]
    assert cli.main(["bench", "compare", "./model.Q4_1.gguf", *arguments]) == 0
    ((plan, settings),) = asked
    assert plan.names == ["octavo:file", "llama.cpp:q4_0", "vllm:bf16"]
    assert [workload.name for workload in plan.workloads] == ["prefill", "decode"]
    assert plan.rounds == 2 and settings.threads == 1
    assert settings.octavo == {"kv_cache_dtype": "bf16"}
    assert settings.folder == tmp_path / "there"
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert printed["summary"][0]["contender"] == "octavo:file"


def test_a_table_is_printed_and_warnings_are_not_lost(asked, capsys):
    assert cli.main(["bench", "compare", "./model.Q4_1.gguf"]) == 0
    out, err = capsys.readouterr()
    assert "faster by" in out and "a neighbour is loud" in err
    assert asked[0][0].names[:2] == ["octavo:file", "octavo:bf16"]
    assert "transformers:bf16" not in asked[0][0].names


def test_neither_help_nor_the_comparison_itself_needs_torch():
    code = "import octavo.bench.peers.compare, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys; from octavo import cli; cli.main(['bench', 'compare', '--help']);"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "octavo bench compare --peers" in done.stdout
