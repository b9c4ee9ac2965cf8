"""scripts/bench-gpu, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from octavo.bench.gpu import run
from octavo.bench.gpu.__main__ import main
from octavo.bench.gpu.cases import CASES, Case, decode, prefill
from octavo.bench.gpu.random_model import FORMATS, SHAPES, write_random_model
from octavo.bench.gpu.report import print_report
from octavo.bench.gpu.run import Document, GpuRun, Outcome, shares
from octavo.bench.peers.workers.workloads import Workload
from octavo.models.footprint import as_stored, matrices, weight_types
from octavo.models.loader import load_model, open_checkpoint

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
    case = Case("8b", "8b", "bf16")
    bytes_read = SHAPES["8b"].step_bytes("bf16")
    alone = shares(case, decode(1), {"decode_tps": 2e12 / bytes_read}, FACTS)
    assert alone == {"bandwidth_share": pytest.approx(0.5)}
    rate = 2e14 / SHAPES["8b"].layer_params  # twice as many operations as parameters
    assert shares(case, prefill(512), {"prefill_tps": rate}, FACTS) == {
        "peak_share": pytest.approx(0.5)
    }
    assert shares(case, decode(4), {"decode_tps": 1.0}, FACTS) == {}


def test_prompts_of_a_mix_have_lengths_as_of_people():
    mix = Workload("mix", "", "mix", 4000, 200, 1, 1, length_cv=1.0)
    lengths = [len(prompt) for prompt in mix.prompts(0, 1000, 0)]
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.05)
    assert min(lengths) >= 1 and max(lengths) <= 1600 and len(set(lengths)) > 300
    assert mix.prompts(0, 1000, 0) == mix.prompts(0, 1000, 0) != mix.prompts(0, 1000, 1)


def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path, monkeypatch):
    device = {"name": "GPU", "uuid": None, "bytes_per_s": 1.0, "ops_per_s": {}}
    monkeypatch.setattr(run, "_ask", lambda command, seconds: device)
    said = []
    document = GpuRun(tmp_path, "cuda", 5.0, said.append).run(CASES)
    assert [outcome.case for outcome in document.outcomes] == list(CASES)
    assert all("s are left" in outcome.left_out["all"] for outcome in document.outcomes)
    assert len(said) == 1 + len(CASES)
    json.dumps(document.as_json(), allow_nan=False)


def test_a_case_that_fails_costs_its_own_figures_only(tmp_path, monkeypatch):
    def ask(command, seconds):
        if "agreement" in command:
            raise run.ChildError("illegal memory access")
        return {"name": "GPU", "uuid": None, "bytes_per_s": 1.0, "ops_per_s": {}}

    monkeypatch.setattr(run, "_ask", ask)
    monkeypatch.setattr(run, "write_random_model", lambda *of: None)
    cases = [Case(name, "tiny", "bf16", checked=True) for name in ("a", "b")]
    document = GpuRun(tmp_path, "cuda", 100.0, lambda line: None).run(cases)
    left_out = [outcome.left_out for outcome in document.outcomes]
    assert left_out == [{"all": "illegal memory access"}] * 2


def test_figures_of_other_kernels_are_not_taken_for_those_of_a_gpu(capsys):
    device = {"name": "GPU", "bytes_per_s": 1e12, "ops_per_s": {"bfloat16": 1e15}}
    outcome = Outcome(Case("slow", "tiny", "bf16"), about={"engine": {"kernels": "reference"}})
    print_report(Document(device, [outcome]), Console(width=200))
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
