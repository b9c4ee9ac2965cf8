"""scripts/bench-gpu, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json

import pytest
from loading import load_model
from rich.console import Console

from octavo.base.errors import BenchmarkError
from octavo.bench.gpu import random_model, run
from octavo.bench.gpu.__main__ import main
from octavo.bench.gpu.cases import CASES, GpuCase, decode, prefill
from octavo.bench.gpu.random_model import FORMATS, SHAPES, write_random_model
from octavo.bench.gpu.report import print_report
from octavo.bench.gpu.run import CaseOutcome, GpuReport, GpuRun, shares
from octavo.bench.peers.child import ChildError
from octavo.bench.peers.workers.workloads import PeerWorkload
from octavo.models.checkpoint import open_checkpoint
from octavo.models.footprint import as_stored, matrices, weight_types

DEVICE = {"name": "GPU", "uuid": None, "bytes_per_s": 1.0, "ops_per_s": {}}
FACTS = {"bytes_per_s": 4e12, "ops_per_s": {"bfloat16": 8e14}}


@pytest.mark.parametrize("format", FORMATS)
def test_random_models_have_the_bytes_that_are_counted(tmp_path, format):
    shape = SHAPES["tiny"]
    write_random_model(tmp_path / "model", shape, format)
    checkpoint = open_checkpoint(tmp_path / "model")
    config = checkpoint.config()
    load_model(tmp_path / "model")  # every parameter has its tensor, and none is left over
    if format == "bf16":
        read = matrices(config, weight_types(checkpoint, config), as_stored)
        assert sum(matrix.num_bytes for matrix in read) == shape.step_bytes(format)
    else:
        assert shape.step_bytes(format) < shape.step_bytes("bf16")


def test_shapes_are_those_of_the_models_they_are_named_after():
    params = {name: shape.layer_params / 1e9 for name, shape in SHAPES.items()}
    assert params["0.6b"] == pytest.approx(0.44, abs=0.01)
    assert params["1b"] == pytest.approx(0.97, abs=0.01)
    assert params["8b"] == pytest.approx(6.98, abs=0.01)


def test_shares_are_of_what_was_measured():
    case = GpuCase("8b", "8b", "bf16")
    bytes_read = SHAPES["8b"].step_bytes("bf16")
    alone = shares(case, decode(1), {"decode_tps": 2e12 / bytes_read}, FACTS)
    assert alone == {"bandwidth_share": pytest.approx(0.5)}
    rate = 2e14 / SHAPES["8b"].layer_params  # twice as many operations as parameters
    assert shares(case, prefill(512), {"prefill_tps": rate}, FACTS) == {
        "peak_share": pytest.approx(0.5)
    }
    assert shares(case, decode(4), {"decode_tps": 1.0}, FACTS) == {}


def test_prompts_of_a_mix_have_lengths_as_of_people():
    mix = PeerWorkload("mix", "", "mix", 4000, 200, 1, 1, length_cv=1.0)
    lengths = [len(prompt) for prompt in mix.prompts(0, 1000, 0)]
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.05)
    assert min(lengths) >= 1 and max(lengths) <= 1600 and len(set(lengths)) > 300
    assert mix.prompts(0, 1000, 0) == mix.prompts(0, 1000, 0) != mix.prompts(0, 1000, 1)


def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_ask", lambda command, seconds: DEVICE)
    said = []
    document = GpuRun(tmp_path, "cuda", 5.0, said.append).run(CASES)
    assert [outcome.case for outcome in document.outcomes] == list(CASES)
    assert all("s are left" in outcome.left_out["all"] for outcome in document.outcomes)
    assert len(said) == 1 + len(CASES)
    json.dumps(document.as_json(), allow_nan=False)


CHECKED = [GpuCase(name, "tiny", "bf16", checked=True) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ChildError("worker:\nillegal memory access"), "worker:\nillegal memory access"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_case_that_fails_costs_its_own_figures_only(tmp_path, monkeypatch, capsys, error, reason):
    agreement = {"kernels": "fused", "prompts": 8, "same_first_token": 8, "largest_difference": 0.1}

    def ask(command, seconds):
        if "device" in command:
            return DEVICE
        if command[-2] == "a":
            raise error
        return agreement

    monkeypatch.setattr(run, "_ask", ask)
    monkeypatch.setattr(GpuRun, "_model", lambda self, case: case.name)
    document = GpuRun(tmp_path, "cuda", 100.0, lambda line: None).run(CHECKED)
    assert [outcome.failed for outcome in document.outcomes] == [reason, None]
    assert document.outcomes[1].agreement == agreement
    assert document.as_json()["cases"][0]["failed"] == reason
    print_report(document, Console(width=200))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", *reason.rpartition("\n")[2].split()] in rows


def test_a_model_that_cannot_be_finished_leaves_nothing_behind(tmp_path, monkeypatch):
    """And is made anew for the next case of it."""
    monkeypatch.setattr(run, "_ask", lambda command, seconds: DEVICE)
    written = []

    def write(folder, tensors):
        written.append(folder)
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_model, "write_safetensors", write)
    document = GpuRun(tmp_path, "cuda", 100.0, lambda line: None).run(CHECKED)
    assert len(written) == 2 and not any(tmp_path.iterdir())
    assert all("No space left" in outcome.failed for outcome in document.outcomes)


def test_what_there_is_is_kept_after_each_case(tmp_path, monkeypatch):
    said, kept = [], []

    def keep(document):
        kept.append([outcome.case.name for outcome in document.outcomes])
        if len(kept) == 1:
            raise BenchmarkError("gpu.json: No space left on device")

    def ask(command, seconds):
        if "device" not in command:
            raise KeyboardInterrupt if command[-2] == "b" else ChildError("it ended")
        return DEVICE

    monkeypatch.setattr(run, "_ask", ask)
    monkeypatch.setattr(GpuRun, "_model", lambda self, case: case.name)
    with pytest.raises(KeyboardInterrupt):
        GpuRun(tmp_path, "cuda", 100.0, said.append, keep).run([CHECKED[0], *CHECKED])
    assert kept == [["a"], ["a", "a"]] and "gpu.json: No space left on device" in said


def test_figures_of_other_kernels_are_not_taken_for_those_of_a_gpu(capsys):
    device = {"name": "GPU", "bytes_per_s": 1e12, "ops_per_s": {"bfloat16": 1e15}}
    outcome = CaseOutcome(
        GpuCase("slow", "tiny", "bf16"), about={"engine": {"kernels": "reference"}}
    )
    print_report(GpuReport(device, [outcome]), Console(width=200))
    assert "slow: run by reference kernels" in capsys.readouterr().out


def test_unknown_cases_are_named(capsys):
    assert main(["--dry-run", "--only", "gone"]) == 1
    assert "no case is called gone: there are tiny" in capsys.readouterr().err


@pytest.mark.long
def test_a_rehearsal_on_the_cpu(tmp_path, capfd):
    path = tmp_path / "found.json"
    cases = ["--only", "tiny", "--only", "tiny against reference ops"]
    assert main(["--dry-run", *cases, "--json", str(path), "--folder", str(tmp_path)]) == 0
    document = json.loads(path.read_text())
    timed, checked = document["cases"]
    assert set(timed["figures"]) == {"decode-1", "decode-4", "prefill-64", "mix"}
    assert timed["figures"]["decode-1"]["decode_tps"] > 0
    assert 0 < timed["figures"]["decode-1"]["bandwidth_share"] < 1
    found = checked["agreement"]
    assert found["same_first_token"] == found["prompts"] == 8
    assert found["largest_difference"] < 1e-3
    said = capfd.readouterr().out
    assert "a rehearsal on the CPU" in said and "against reference ops" in said
    assert not list(tmp_path.glob("octavo-gpu-*"))
