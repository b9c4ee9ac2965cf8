from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from octavo import cli


@pytest.fixture
def engine(tiny_model):
    return [str(tiny_model), "--device", "cpu", "--kernels", "reference"]


SHORT = ["--input-len", "8", "--output-len", "4", "--repeat", "2"]


def test_sweep_prints_a_table_and_writes_files(engine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("out.json", "out.csv", "out.svg", "out.png")}
    status = cli.main(
        ["bench", "sweep", *engine, *SHORT, "--concurrency", "4,1,2", "--max-e2e-ms", "60000"]
        + ["--output", str(files["out.json"]), "--csv", str(files["out.csv"])]
        + ["--plot", str(files["out.svg"]), "--plot", str(files["out.png"])]
    )
    assert status == 0
    assert all(path.stat().st_size for path in files.values())
    document = json.loads(files["out.json"].read_text())
    assert [point["concurrency"] for point in document["points"]] == [1, 2, 4]
    assert document["best"]["is_met"]
    assert document["run"]["settings"]["concurrency"] == [1, 2, 4]
    assert len(document["run"]["samples"]["points"][2]) == 2
    out = capsys.readouterr().out
    assert "output tok/s" in out and "TTFT ms" in out
    assert "best with p99 E2E ≤ 60000 ms" in out


def test_sweep_says_that_no_point_is_within_bounds(engine, capsys):
    argv = ["bench", "sweep", *engine, *SHORT, "--concurrency", "1,2", "--max-ttft-ms", "0.0001"]
    assert cli.main([*argv, "--percentile", "50"]) == 0
    assert "none meets p50 TTFT ≤ 0.0001 ms; nearest is" in capsys.readouterr().out


def test_sweep_json_has_the_default_concurrencies(engine, capsys):
    assert cli.main(["bench", "sweep", *engine, *SHORT, "--max-num-seqs", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [point["concurrency"] for point in document["points"]] == [1, 2, 3]
    assert document["best"] is None


def test_sweep_refuses_prompts_that_do_not_fit_before_measuring(engine, capsys):
    assert cli.main(["bench", "sweep", *engine, "--input-len", "300"]) == 1
    assert "shorten the prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sweep", "--concurrency", "1,x"], "'x' is no integer"),
        (["sweep", "--concurrency", "0"], "'0' is no integer"),
        (["sweep", "--max-ttft-ms", "-1"], "not a number above 0"),
        (["sweep", "--max-ttft-ms", "nan"], "not a number above 0"),
        (["sweep", "--percentile", "101"], "not a percentile"),
        (["sweep", "--plot", "a.pdf"], ".png or .svg"),
        (["sweep", "--base-url", "http://x", "--threads", "2"], "not with --base-url"),
        (["sweep", "--model-name", "x"], "--base-url"),
        (["ablation", "--only", "nonsense"], "no ablation 'nonsense'"),
        (["ablation", "--plot", "a.gif"], ".png or .svg"),
        (["prefix", "--text", "/nowhere"], "--text /nowhere: No such file"),
        (["prefix", "--questions", "0"], "'0' is no integer"),
    ],
)
def test_wrong_usage(argv, said, capsys):
    assert cli.main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["latency", "throughput", "startup", "serve", "sweep", "ablation", "prefix"]
)
def test_missing_matplotlib_is_said_before_anything_is_loaded(command, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    assert cli.main(["bench", command, "no-such-model", "--plot", "a.png"]) == 1
    assert 'pip install "octavo[plots]"' in capsys.readouterr().err


def test_ablation(engine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, output = tmp_path / "worth.svg", tmp_path / "out.json"
    argv = ["bench", "ablation", *engine, "--quick", "--only", "rounds,kv-cache,prefix-cache"]
    assert cli.main([*argv, "--plot", str(picture), "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert [each["name"] for each in document["ablations"]] == ["kv-cache", "prefix-cache"]
    assert [each["same_answers"] for each in document["ablations"]] == ["yes", "yes"]
    assert document["skipped"] == [{"name": "rounds", "reason": "needs the native CPU kernels"}]
    assert len(document["run"]["samples"]["kv-cache"]["on"]) == 1
    assert "kv-cache" in picture.read_text()
    out = capsys.readouterr().out
    assert "worth" in out and "rounds: not measured: needs the native CPU kernels" in out


def test_ablation_with_all_skipped_still_reports(engine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = ["bench", "ablation", *engine, "--only", "rounds", "--plot", str(tmp_path / "x.png")]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ablations"] == []


def test_prefix(engine, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 4)
    argv = [
        "bench",
        "prefix",
        *engine,
        "--prefix-len",
        "32",
        "--question-len",
        "4",
        "--repeat",
        "2",
    ]
    assert cli.main([*argv, "--questions", "3", "--output-len", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["warm_hit_rate"] == pytest.approx(32 / 36)
    assert document["same_answers"] is True
    assert {"cold_ttft_ms", "warm_ttft_ms", "speedup", "no_cache_ttft_ms"} <= document.keys()
    assert cli.main([*argv, "--text", str(text)]) == 0
    assert "cold / warm" in capsys.readouterr().out
    assert cli.main([*argv, "--text", str(text), "--prefix-len", "200"]) == 2
    assert "lower prefix_len" in capsys.readouterr().err


def test_prefix_at_once(engine, tmp_path, capsys):
    argv = ["bench", "prefix", *engine, "--at-once", "--prefix-len", "32", "--question-len", "4"]
    assert cli.main([*argv, "--questions", "3", "--output-len", "6", "--repeat", "1"]) == 0
    assert "shared / separate" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sweep", "ablation", "prefix"])
def test_help_has_examples_and_loads_nothing(command, capsys):
    import subprocess

    script = (
        "import sys; from octavo import cli; "
        f"status = cli.main(['bench', '{command}', '--help']); "
        "print([name for name in ('torch', 'numpy', 'rich', 'matplotlib') if name in sys.modules]);"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"octavo bench {command}" in done.stdout and "examples:" in done.stdout
    assert done.stdout.endswith("[]\n")
