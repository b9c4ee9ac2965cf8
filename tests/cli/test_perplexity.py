from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.bench import record

TEXT = "".join(f"{i * i % 97} bottles of beer on wall {i}.\n" for i in range(20))

KEYS = {
    *("tokens", "perplexity", "stderr", "kl_mean", "kl_p99", "same_top", "tokens_per_s"),
    *("nll_mean", "nll_mean_stderr", "ctx", "score", "num_windows", "num_computed_tokens"),
    *("num_preemptions", "elapsed_s", "model", "text", "base", "engine", "run"),
}
COMPARED = {
    *("kl_stderr", "kl_median", "kl_p90", "kl_max", "same_top_stderr", "base_perplexity"),
    *("base_perplexity_stderr", "delta_ppl", "delta_ppl_stderr", "ppl_ratio", "ppl_ratio_stderr"),
    *("ln_ppl_ratio", "ln_ppl_ratio_stderr", "correlation", "delta_p_mean", "delta_p_stderr"),
    "delta_p_rms",
}


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are no reason for a warning."""
    monkeypatch.setattr(record, "OTHERS_BUSY", 1e9)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]):
    """Runs ``octavo perplexity``; returns exit status, stdout and stderr."""

    def run_command(*flags: object, model: Path = tiny_model, of: Path = text):
        settings = ["--kernels", "reference", *map(str, flags)]
        status = cli.main(["perplexity", str(model), "--text", str(of), *settings])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def test_json(run, tiny_model, text) -> None:
    status, out, err = run("--ctx", 64, "--json", "--dtype", "float32", "--kv-cache-dtype", "f32")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert document.keys() == KEYS
    num_windows = len(TEXT) // 64
    assert document["num_windows"] == num_windows
    assert document["tokens"] == num_windows * 31
    assert document["num_computed_tokens"] == num_windows * 63
    assert document["kl_mean"] is document["kl_p99"] is document["same_top"] is None
    assert document["perplexity"] > 1 and document["stderr"] > 0 and document["tokens_per_s"] > 0
    assert document["model"] == str(tiny_model) and document["base"] is None
    settings = document["run"]["settings"]
    assert settings["ctx"] == 64 and settings["text"] == str(text)
    assert settings["engine"]["dtype"] == "float32"
    assert document["engine"]["prefix_caching"] is False
    assert document["run"]["noise"]["before"]["gemm_gflops"] == 100.0


def test_which_tokens_are_scored(run) -> None:
    _, out, _ = run("--ctx", 64, "--score", "all", "--max-tokens", 200, "--json")
    document = json.loads(out)
    assert (document["num_windows"], document["tokens"]) == (3, 3 * 63)
    assert document["score"] == "all"


def test_a_base_is_saved_and_compared_with(run, tmp_path, tiny_model) -> None:
    base = tmp_path / "base"
    status, out, _ = run("--ctx", 64, "--max-tokens", 300, "--save-base", base, "--json")
    saved = json.loads(out)
    assert status == 0 and saved.keys() == KEYS
    # ctx, score and the number of tokens are the base's.
    status, out, _ = run("--kl-base", base, "--json", "--dtype", "bfloat16")
    document = json.loads(out)
    assert status == 0 and document.keys() == KEYS | COMPARED
    assert (document["ctx"], document["num_windows"]) == (64, 4)
    assert document["base_perplexity"] == pytest.approx(saved["perplexity"], rel=1e-6)
    assert 1e-6 < document["kl_mean"] <= document["kl_p99"] <= document["kl_max"] < 0.1
    assert 0.5 < document["same_top"] <= 1
    assert document["base"]["file"] == str(base)
    assert document["base"]["model"].startswith(f"{tiny_model}, reference kernels, float32")


def test_tables(run, tmp_path, tiny_model) -> None:
    base = tmp_path / "base"
    status, out, err = run("--ctx", 64, "--save-base", base)
    assert (status, err) == (0, "")
    assert f"{tiny_model}: 279 tokens scored, in 9 windows of 64" in out
    lines = [line.split() for line in out.splitlines()]
    (perplexity,) = (line for line in lines if line[:1] == ["perplexity"])
    assert float(perplexity[1]) > 1 and float(perplexity[2]) > 0
    status, out, _ = run("--kl-base", base, "--output", tmp_path / "out.json")
    assert status == 0
    assert f"against {tiny_model}, reference kernels" in out
    (same,) = (line for line in out.splitlines() if "same most probable" in line)
    assert "100.00%" in same
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["kl_max"] < 4.8e-8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ctx", "0"], "no integer of at least 1"),
        (["--ctx", "2"], "a context of 2 tokens has none to score: give at least 3"),
        (["--ctx", "1", "--score", "all"], "give at least 2"),
        (["--ctx", "64", "--max-tokens", "63"], "63 tokens are less than one window of 64"),
        (["--score", "some"], "invalid choice"),
        (["--kl-base", "a", "--save-base", "b"], "not allowed with"),
        (["--max-model-len", "64"], "unrecognized arguments"),
        (["--no-enable-prefix-caching"], "unrecognized arguments"),
        (["--block-size", "0"], "block_size must be an integer of at least 1"),
    ],
)
def test_wrong_usage(run, flags, message) -> None:
    status, out, err = run(*flags)
    assert (status, out) == (2, "")
    assert message in err


def test_texts_that_cannot_be_read(run, tmp_path) -> None:
    status, _, err = run(of=tmp_path / "nowhere.txt")
    assert status == 2 and "nowhere.txt: No such file or directory" in err
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    status, _, err = run(of=latin)
    assert status == 2 and "latin.txt: not UTF-8 text, at byte 2" in err


def test_bom_and_line_ends_are_text(run, tmp_path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"a\r\n" * 20)
    _, out, _ = run("--ctx", 63, "--json", of=path)
    assert json.loads(out)["num_windows"] == 1  # a token is a byte


@pytest.mark.parametrize("content", ["", "too short"])
def test_a_short_text(run, tmp_path, content) -> None:
    path = tmp_path / "short.txt"
    path.write_text(content)
    status, _, err = run("--ctx", 64, of=path)
    assert status == 1
    assert f"the text has {len(content)} tokens, and one window takes 64: give a longer" in err


def test_bases_that_do_not_fit(run, tmp_path, text) -> None:
    status, _, err = run("--kl-base", tmp_path / "nowhere")
    assert status == 1 and "nowhere cannot be read" in err
    base = tmp_path / "base"
    run("--ctx", 64, "--save-base", base)
    status, _, err = run("--kl-base", base, "--ctx", 32)
    assert status == 1 and "was made with ctx 64, this run has 32" in err
    text.write_text("x" + TEXT)
    status, _, err = run("--kl-base", base)
    assert status == 1 and "was made from other tokens, from number 0 on" in err
    base.write_bytes(base.read_bytes()[:-1])
    status, _, err = run("--kl-base", base)
    assert status == 1 and "is damaged" in err


def test_too_long_for_the_model(run) -> None:
    status, _, err = run("--ctx", 300)
    assert status == 1 and "300 exceeds the 256 positions of the model" in err


def test_help_is_quick() -> None:
    code = (
        "import sys; from octavo import cli; cli.main(['perplexity', '--help']); "
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--save-base" in done.stdout and "octavo perplexity --text" in done.stdout
