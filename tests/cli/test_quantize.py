"""``octavo quantize``: what it prints, what it makes beside each other, and how it fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import quantize
from octavo.quality import report
from octavo.quantize import methods

KEYS = {"out", "method", "format", "bits_per_weight", "bytes", "elapsed_s", "report"}
REPORT_KEYS = {
    *("text", "tokens", "perplexity", "base_perplexity", "kl_mean", "kl_p99", "same_top"),
    *("decode_tps", "prefill_tps", "base_decode_tps", "base_prefill_tps"),
    *("served_perplexity", "served_kl_mean"),
}
MEASURED = report.QuantizationReport(
    "built-in", 3072, 9.5, 9.25, 0.01, 0.2, 0.9, 80.0, 800.0, 50.0, 700.0, 9.6, 0.02
)


class FakeJudge:
    """Finds the same of every model. ``asked``: the base and its text, and then the models."""

    asked: list = []

    def __init__(self, base, text, say):
        FakeJudge.asked = [(base, text)]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def report(self, model):
        self.asked.append(model)
        return MEASURED


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[FakeJudge]:
    monkeypatch.setattr(report, "QuantizationJudge", FakeJudge)
    return FakeJudge


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs ``octavo quantize MODEL tmp_path/NAME``; returns exit status, stdout and stderr."""

    def run_command(*flags: object, name: str = "out", model: Path = tiny_model):
        status = cli.main(["quantize", str(model), str(tmp_path / name), *map(str, flags)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def test_choices_are_those_of_recipes():
    assert tuple(methods.METHODS) == quantize.METHODS
    assert methods.FORMATS == quantize.FORMATS


def test_json(run, tmp_path):
    status, out, err = run("--method", "fp8", "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert document.keys() == KEYS
    assert document["out"] == str(tmp_path / "out") and document["report"] is None
    assert (document["method"], document["format"]) == ("fp8", "compressed-tensors")
    assert document["bytes"] > 0 and 8 < document["bits_per_weight"] < 16
    assert (tmp_path / "out" / "config.json").exists()


def test_settings_reach_the_file(run, tmp_path):
    flags = ["--bits", 8, "--group-size", 16, "--asymmetric", "--no-calibration"]
    assert run("--method", "rtn", *flags)[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (8, 16)
    assert weights["symmetric"] is False


def test_rotate(run, tmp_path):
    flags = ["--method", "rtn", "--no-calibration", "--group-size", -1]
    assert run(*flags, name="plain")[0] == 0
    status, _, err = run(*flags, "--rotate", name="rotated")
    assert status == 0 and err.count("\n") == 2 and "both are written" in err
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "rotated")]
    sizes = [file.stat().st_size for file in files]
    assert sizes[1] >= sizes[0] + 260 * 48 * 2
    config = json.loads((tmp_path / "rotated" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    # What has a head of its own already is not said to grow.
    again = run(*flags, "--rotate", "--requantize", name="again", model=tmp_path / "rotated")
    assert again[0] == 0 and "both are written" not in again[2]


def test_a_mix(run, tmp_path):
    flags = ["--target-bpw", 11, "--mix-bits", "4,8,16", "--calibration-tokens", 512]
    status, out, _ = run("--method", "rtn", "--group-size", 16, *flags, "--json")
    document = json.loads(out)
    assert status == 0 and document.keys() == KEYS | {"choice"}
    assert document["bits_per_weight"] <= 11 and document["format"] == "compressed-tensors"
    choice = document["choice"]
    assert choice.keys() == {"expected_kl", "kinds", "matrices"}
    assert set(choice["matrices"].values()) <= {"4 bits", "8 bits", "16 bits"}


def test_a_mix_for_people(run):
    flags = ["--target-bpw", 15, "--calibration-tokens", 512]
    status, out, _ = run("--method", "gguf", *flags, name="m.gguf")
    assert status == 0 and "expected KL" in out
    for shown in ("embed_tokens", "q_proj", "down_proj", "F16"):
        assert shown in out


def test_a_mix_beside_others(run, judge, tmp_path):
    flags = ["--target-bpw", 11, "--group-size", 16, "--calibration-tokens", 512, "--json"]
    status, out, _ = run("--compare", "rtn,q8_0", *flags)
    rows = json.loads(out)["rows"]
    assert status == 0 and ["choice" in row for row in rows] == [True, False]


def test_for_people(run, tmp_path):
    status, out, _ = run("--method", "gguf", "--type", "q8_0", "--no-calibration", name="m.gguf")
    assert status == 0 and "gguf" in out and (tmp_path / "m.gguf").exists()


def test_report(run, judge, tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    text = str(tmp_path / "text.txt")
    status, out, _ = run("--method", "fp8", "--report", "--report-text", text, "--json")
    document = json.loads(out)
    assert status == 0 and document["report"].keys() == REPORT_KEYS
    assert document["report"]["perplexity"] == 9.5
    assert judge.asked == [(str(tiny_model), (text, "a text")), str(tmp_path / "out")]


def test_report_for_people(run, judge, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    status, out, _ = run("--method", "fp8", "--report")
    assert status == 0
    for shown in ("the original", "9.250", "9.500", "90.0%", "3,072 tokens of built-in"):
        assert shown in out


def test_compare(run, judge, tmp_path):
    flags = ["--compare", "rtn,q4_0,fp8", "--no-calibration", "--group-size", 16, "--json"]
    status, out, _ = run(*flags)
    document = json.loads(out)
    assert status == 0 and document.keys() == {"rows", "failed"}
    made = [tmp_path / name for name in ("out-rtn", "out-q4_0.gguf", "out-fp8")]
    assert [row["out"] for row in document["rows"]] == list(map(str, made))
    assert [row["method"] for row in document["rows"]] == ["rtn", "gguf", "fp8"]
    assert all(row.keys() == KEYS for row in document["rows"])
    assert all(row["report"].keys() == REPORT_KEYS for row in document["rows"])
    assert all(path.exists() for path in made) and judge.asked[1:] == list(map(str, made))


def test_plots(run, judge, tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "costs.svg", tmp_path / "costs.png"]
    flags = ["--compare", "rtn,q4_0", "--no-calibration", "--group-size", 16]
    status, _, err = run(*flags, "--plot", paths[0], "--plot", paths[1])
    assert status == 0 and "error" not in err
    drawn = paths[0].read_text()
    for words in ("out-rtn", "out-q4_0.gguf", "3,072 tokens of built-in", "bits per weight"):
        assert words in drawn
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_settings_of_a_comparison_are_for_those_that_have_a_choice():
    parser = argparse.ArgumentParser()
    quantize.configure(parser)
    flags = "--compare qat,gptq,nf4,smoothquant --bits 3 --train-tokens 9 --train-codes"
    args = parser.parse_args(["model", "out", *flags.split(), "--calibration-tokens", "7"])
    found = {name: quantize.wanted_of(args, name) for name in ("qat", "gptq", "nf4", "smoothquant")}
    assert [wanted.bits for wanted in found.values()] == [3, 3, None, None]
    assert [wanted.train_tokens for wanted in found.values()] == [9, None, None, None]
    assert [wanted.train_codes for wanted in found.values()] == [True, False, False, False]
    assert [wanted.calibration_tokens for wanted in found.values()] == [7, 7, 7, 7]


@pytest.mark.parametrize(
    "flags, what",
    [
        ([], "--method"),
        (["--method", "fp8", "--plot", "a.svg"], "--report or --compare"),
        (["--method", "fp8", "--report", "--plot", "a.pdf"], ".png or .svg"),
        (["--method", "fp8", "--compare", "rtn"], "not allowed with"),
        (["--method", "best"], "invalid choice"),
        (["--method", "fp8", "--bits", "4"], "fp8 has no --bits"),
        (["--method", "rtn", "--type", "Q4_0"], "is of --method gguf"),
        (["--method", "gguf", "--type", "Q9"], "no --type 'Q9'"),
        (["--method", "nf4", "--format", "awq"], "does not hold what --method nf4 makes"),
        (["--method", "gptq", "--no-calibration"], "needs a text"),
        (["--method", "gptq", "--target-bpw", 6, "--bits", 4], "leave --bits out"),
        (["--method", "gguf", "--target-bpw", 6, "--type", "Q4_0"], "leave --type out"),
        (["--method", "rtn", "--target-bpw", 6, "--mix-bits", "4;8"], "no list of numbers"),
        (["--method", "rtn", "--mix-bits", "4,8"], "--mix-bits needs --target-bpw"),
        (["--method", "gptq", "--train-tokens", "9"], "gptq does not train"),
        (["--method", "autoround", "--train-codes"], "autoround does not train"),
        (["--compare", "rtn,rtn"], "each once"),
        (["--compare", "rtn,best"], "no method 'best'"),
    ],
)
def test_wrong_usage(run, tmp_path, flags, what):
    status, out, err = run(*flags)
    assert (status, out) == (2, "") and what in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, what",
    [
        (["--method", "rtn", "--no-calibration", "--group-size", 48], "cut into groups of 48"),
        (["--method", "nf4"], "no blocks of 64"),
        (["--method", "rtn", "--group-size", 16, "--target-bpw", 2], "no mix has 2 bits"),
        (["--method", "rtn", "--calibration", "/nowhere/text.txt"], "the calibration text"),
    ],
)
def test_what_cannot_be_made_is_one_line(run, tmp_path, flags, what):
    status, out, err = run(*flags)
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert (status, out) == (1, "") and what in lines[0] and len(lines) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_quantized_already(run, tmp_path):
    assert run("--method", "fp8", name="once")[0] == 0
    twice = {"name": "twice", "model": tmp_path / "once"}
    status, _, err = run("--method", "rtn", "--no-calibration", **twice)
    assert status == 1 and "--requantize" in err and err.count("\n") == 1
    assert run("--method", "rtn", "--no-calibration", "--requantize", **twice)[0] == 0
    status, _, err = run("--method", "fp8", name="once")
    assert status == 1 and "exists already" in err


def damaged(model: Path, folder: Path, name: str, place: tuple[int, ...], value: float) -> Path:
    """A copy of a folder's model, with one value changed."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = tensors[name].float()
    tensors[name][place] = torch.tensor(value)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


MATRIX, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    "method", [("rtn", "--no-calibration"), ("gguf", "--type", "Q8_0"), ("fp8",)]
)
@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        (MATRIX, (3, 5), float("nan"), "row 3, column 5, is nan"),
        (MATRIX, (0, 1), float("-inf"), "row 0, column 1, is -inf"),
        (MATRIX, (3, 5), 7e4, "row 3, column 5, is 70000"),
        (NORM, (2,), float("nan"), "value 2, is nan"),
    ],
)
def test_a_value_that_is_no_weight_is_named(
    run, tiny_model, tmp_path, method, name, place, value, words
):
    model = damaged(tiny_model, tmp_path / "damaged", name, place, value)
    status, _, err = run("--method", *method, model=model)
    assert status == 1
    last = err.splitlines()[-1]
    assert name in last and words in last and "Traceback" not in err
    assert not list(tmp_path.glob("out*"))


def test_a_comparison_keeps_what_did_not_fail(run, judge, tmp_path, monkeypatch):
    def report_of(self, model):
        if "q8_0" in model:
            raise RuntimeError("this one\ncannot be judged")
        return MEASURED

    monkeypatch.setattr(judge, "report", report_of)
    flags = ["--compare", "nf4,q8_0,rtn", "--no-calibration", "--group-size", 16]
    status, out, err = run(*flags, "--json")
    document = json.loads(out)
    assert status == 1
    assert [row["method"] for row in document["rows"]] == ["gguf", "rtn"]
    assert [row["report"] is None for row in document["rows"]] == [True, False]
    failed = document["failed"]
    assert len(failed) == 2 and "no blocks of 64" in failed[str(tmp_path / "out-nf4")]
    assert "RuntimeError: this one cannot be judged" in "".join(failed.values())
    assert [line for line in err.splitlines() if line.startswith("octavo: error: ")] != []
    again = run(*flags, name="again")
    assert again[0] == 1 and "nf4" in again[2] and "rtn" in again[1] and "q8_0" in again[1]


def test_where_all_fail_the_comparison_says_so(run, judge, tmp_path):
    status, out, err = run("--compare", "nf4,nf4", "--no-calibration")
    assert status == 2  # each once
    status, out, err = run("--compare", "nf4", "--no-calibration")
    assert (status, out) == (1, "") and "no blocks of 64" in err


def test_that_rows_do_not_fit_is_said_before(run, tmp_path):
    status, _, err = run("--method", "gguf", "--type", "Q4_K_M", "--no-calibration")
    assert status == 0
    assert "Q4_K_M does not fit" in err and "rows of 48 are F16, not Q4_K" in err
    assert "--method gptq" in err  # 48 is no multiple of 32 either


def test_that_embeddings_stay_large_is_said_before(run, tmp_path):
    flags = ["--target-bpw", 11, "--mix-bits", "4,8,16", "--calibration-tokens", 512]
    _, _, err = run("--method", "rtn", "--group-size", 16, *flags)
    assert "the embedding stays at 16 bits" in err and "--method gguf --target-bpw 11.00" in err


def test_a_run_that_is_ended_leaves_nothing(tiny_model, tmp_path):
    """SIGTERM in the middle of the work, as it comes from a scheduler."""
    import os
    import signal
    import subprocess
    import sys

    program = (
        "import os, signal, sys; from octavo import cli\n"
        "from octavo.models import gguf_writer\n"
        "def end(file, tensor): os.kill(os.getpid(), signal.SIGTERM)\n"
        "gguf_writer._write_data = end\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    argv = ["quantize", str(tiny_model), str(tmp_path / "out.gguf"), "--method", "gguf"]
    argv += ["--type", "Q8_0", "--no-calibration"]
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert list(tmp_path.iterdir()) == []
