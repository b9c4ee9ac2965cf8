"""``octavo quantize``: what it prints, what it makes beside each other, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import quantize
from octavo.quality import report
from octavo.quantization.produce import recipes

KEYS = {"out", "method", "format", "bits_per_weight", "bytes", "elapsed_s", "report"}
REPORT_KEYS = {
    *("text", "tokens", "perplexity", "base_perplexity", "kl_mean", "kl_p99", "same_top"),
    *("decode_tps", "prefill_tps", "base_decode_tps", "base_prefill_tps"),
}
MEASURED = report.Report("built-in", 3072, 9.5, 9.25, 0.01, 0.2, 0.9, 80.0, 800.0, 50.0, 700.0)


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
    monkeypatch.setattr(report, "Judge", FakeJudge)
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
    assert tuple(recipes.METHODS) == quantize.METHODS
    assert recipes.FORMATS == quantize.FORMATS


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
    assert run(*flags, name="plain")[::2] == (0, "")
    status, _, err = run(*flags, "--rotate", name="rotated")
    assert status == 0 and err.count("\n") == 1 and "both are written" in err
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "rotated")]
    sizes = [file.stat().st_size for file in files]
    assert sizes[1] >= sizes[0] + 260 * 48 * 2
    config = json.loads((tmp_path / "rotated" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    # What has a head of its own already is not said to grow.
    again = run(*flags, "--rotate", "--requantize", name="again", model=tmp_path / "rotated")
    assert again[::2] == (0, "")


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
    assert status == 0 and document.keys() == {"rows"}
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
    assert (status, err) == (0, "")
    drawn = paths[0].read_text()
    for words in ("out-rtn", "out-q4_0.gguf", "3,072 tokens of built-in", "bits per weight"):
        assert words in drawn
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, what",
    [
        ([], "--method"),
        (["--method", "fp8", "--plot", "a.svg"], "--report or --compare"),
        (["--method", "fp8", "--report", "--plot", "a.pdf"], ".png or .svg"),
        (["--method", "fp8", "--compare", "rtn"], "not allowed with"),
        (["--method", "best"], "invalid choice"),
        (["--method", "fp8", "--bits", "4"], "no bits to choose"),
        (["--method", "rtn", "--type", "Q4_0"], "is of method gguf"),
        (["--method", "gguf", "--type", "Q9"], "no type 'Q9'"),
        (["--method", "nf4", "--format", "awq"], "does not hold what nf4 makes"),
        (["--method", "gptq", "--no-calibration"], "needs a text"),
        (["--method", "gptq", "--target-bpw", 6, "--bits", 4], "leave bits out"),
        (["--method", "gguf", "--target-bpw", 6, "--type", "Q4_0"], "leave type out"),
        (["--method", "rtn", "--target-bpw", 6, "--mix-bits", "4;8"], "no list of numbers"),
        (["--method", "rtn", "--mix-bits", "4,8"], "need a target"),
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
    assert (status, out) == (1, "") and what in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_quantized_already(run, tmp_path):
    assert run("--method", "fp8", name="once")[0] == 0
    twice = {"name": "twice", "model": tmp_path / "once"}
    status, _, err = run("--method", "rtn", "--no-calibration", **twice)
    assert status == 1 and "--requantize" in err and err.count("\n") == 1
    assert run("--method", "rtn", "--no-calibration", "--requantize", **twice)[0] == 0
    status, _, err = run("--method", "fp8", name="once")
    assert status == 1 and "is there already" in err
