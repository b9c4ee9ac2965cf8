"""``octavo plan`` and ``octavo advise``: what is typed, what is said, and the exit status."""

from __future__ import annotations

import json

import pytest
from calibrations import keep_calibration
from svg import texts_of

from octavo.cli import main
from octavo.cost import this_machine

RATES = {"bytes_per_s": 30e9, "int8_per_s": 900e9, "fp16_per_s": 400e9, "fp32_per_s": 200e9}
SMALL = ("llama-3.1-8b", "--hardware", "h100-sxm", "--profile", "vllm")


@pytest.fixture
def octavo(capsys):
    """``octavo("plan", ...)``: status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([*map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def document(octavo):
    """Status and JSON."""

    def run(*arguments: object) -> tuple[int, dict]:
        status, out, err = octavo(*arguments, "--json")
        assert err == ""
        return status, json.loads(out)

    return run


def test_what_is_feasible_exits_with_0(document):
    status, found = document("plan", *SMALL, "--isl", 1024, "--osl", 256, "--concurrency", 16)
    assert status == 0 and found["feasible"] is True and found["binding"] is None
    assert found["input_len"] == 1024 and found["concurrency"] == 16
    assert found["output_tps"]["low"] < found["output_tps"]["value"] < found["output_tps"]["high"]


def test_what_is_not_exits_with_2_and_says_why(document, octavo):
    arguments = ("plan", "llama-3.1-70b", "--hardware", "h100-sxm", "--profile", "vllm")
    status, found = document(*arguments)
    assert status == 2 and found["feasible"] is False and found["binding"] == "weights"
    assert found["ttft_ms"] is None and found["cost"]["per_day"] is None
    status, out, _ = octavo(*arguments)
    assert status == 2 and "not feasible: weights" in out and "1. " in out


def test_flags_reach_the_plan(document):
    _, found = document(
        *("plan", "llama-3.1-70b", "--hardware", "h100-sxm:8", "--tp", 4, "--quantization", "fp8"),
        *("--kv-cache-dtype", "fp8", "--max-num-seqs", 32, "--max-num-batched-tokens", 4096),
        *("--max-model-len", 9000, "--gpu-memory-utilization", 0.8, "--rate", 2, "--price", 3),
        *("--slo", "ttft=2s,tpot=80@p90", "--profile", "vllm"),
    )
    deployment = found["deployment"]
    assert (deployment["tp"], deployment["replicas"]) == (4, 2)
    assert (deployment["quantization"], deployment["kv_cache_dtype"]) == ("fp8", "fp8")
    assert deployment["max_num_seqs"] == 32 and deployment["max_num_batched_tokens"] == 4096
    assert deployment["max_model_len"] == 9000
    assert found["memory"]["usable_bytes"] == pytest.approx(
        0.8 * found["memory"]["total_bytes"], rel=1e-6
    )
    assert found["cost"]["per_day"]["value"] == pytest.approx(8 * 3 * 24)
    assert [each["limit"] for each in found["slo"]] == ["ttft_p90", "tpot_p90"]


def test_a_config_can_be_planned_before_there_are_weights(document, tmp_path):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, found = document("plan", path, "--hardware", "l4")
    layer = 512 * 64 * (8 + 2 + 2) + 8 * 64 * 512 + 3 * 512 * 1024 + 2 * 512
    assert found["parameters"] == 4 * layer + 2 * 1000 * 512 + 512


def test_tables_are_shown_where_they_are_asked_for(octavo, document):
    _, plain, _ = octavo("plan", *SMALL)
    _, out, _ = octavo("plan", *SMALL, "--memory", "--roofline")
    for words in ("memory of one device", "mlp.gate_up", "ridge"):
        assert words in out and words not in plain
    _, found = document("plan", *SMALL, "--roofline")
    assert {op["name"] for op in found["roofline"]["decode"]["ops"]} >= {"mlp.down", "head"}


def test_of_experts_it_is_said_from_when_on_whole_ones_pay(octavo):
    flags = ("--hardware", "h200:8", "--tp", "1", "--dp", "8", "--ep", "8", "--concurrency", "64")
    _, told, _ = octavo("plan", "deepseek-v3", *flags)
    (line,) = (each for each in told.splitlines() if "by its experts" in each)
    assert "with all experts on each copy, and" in line and "whole ones, ahead from 4 on" in line
    _, told, _ = octavo("plan", "llama-3.1-8b", "--hardware", "h100-sxm:2", "--tp", "2")
    assert "by its experts" not in told


def test_owned_hardware(document):
    _, found = document(
        *("plan", "qwen3-8b", "--hardware", "rtx4090", "--purchase", 2000, "--years", 2),
        *("--electricity", 0.3, "--utilization", 1.0),
    )
    hour = 2000 / (2 * 8760) + 0.45 * 0.3
    assert found["cost"]["per_day"]["value"] == pytest.approx(24 * hour)


def test_a_plan_is_confirmed_by_simulation(document, octavo):
    arguments = ("plan", *SMALL, "--isl", 256, "--osl", 32, "--rate", 5, "--slo", "tpot=50")
    status, found = document(*arguments, "--confirm")
    (simulated,) = found["simulated"]
    assert status == 0 and simulated["holds"] is True
    foreseen = found["slo"][0]["predicted_ms"]["value"]
    assert simulated["simulated_ms"] == pytest.approx(foreseen, rel=0.35)
    _, out, _ = octavo(*arguments, "--confirm")
    assert "simulated: tpot_p99 is" in out


def test_replicas_are_split_by_simulation(document, octavo):
    arguments = ("plan", "llama-3.1-8b", "--hardware", "h100-sxm:2", "--tp", 1, "--rate", 2)
    arguments = (*arguments, "--slo", "tpot=50,ttft=2s", "--disaggregate")
    status, found = document(*arguments)
    assert status == 0 and {each["prefill_replicas"] for each in found["splits"]} == {0, 1}
    apart = next(each for each in found["splits"] if each["prefill_replicas"])
    assert apart["roles"]["decode"]["p99_tpot_ms"] <= 50
    _, out, _ = octavo(*arguments)
    assert "--prefill-replicas 0: tpot_p99" in out


def test_hardware_of_ones_own(document, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        '[[devices]]\nname = "Lab card"\nmemory_gib = 40\nbandwidth_gb_s = 900\n'
        "dense_tflops = { fp16 = 100 }\nusd_per_hour = [1, 2]\n"
    )
    own = ("--hardware-file", path)
    _, found = document("plan", "qwen3-8b", "--hardware", "lab-card", *own)
    assert found["deployment"]["hardware"] == "Lab card"
    assert found["memory"]["total_bytes"] == 40 * 2**30
    _, found = document("plan", "qwen3-8b", "--hardware", "lab card,l4", *own, "--cheapest")
    assert "Lab card" in {offer["hardware"] for offer in found["offers"]}


def test_the_cheapest(document, octavo):
    arguments = ("plan", "qwen3-8b", "--hardware", "l4,l40s", "--cheapest", "--rate", 2)
    status, found = document(*arguments, "--slo", "tpot=60", "--profile", "vllm")
    assert status == 0 and found["confirmed"] is True
    assert {offer["hardware"] for offer in found["offers"]} == {"L4", "L40S"}
    status, out, _ = octavo(*arguments, "--slo", "tpot=1", "--most-devices", 4)
    assert status == 2 and "tpot" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--hardware", "h1000"), "H100"),
        (("--rate", -5), "rate must be above 0"),
        (("--isl", 0), "input_len must be 1 or more"),
        (("--slo", "ttft=2s,e2e=1s"), "contradicts"),
        (("--quantization", "int3"), "int"),
        (("--profile", "vlm"), "vllm"),
        (("--tp", 5, "--hardware", "h100-sxm", "--profile", "vllm"), "heads"),
        (("--price", 0, "--hardware", "h100-sxm"), "above 0"),
    ],
)
def test_what_cannot_be_fails_with_one_line(octavo, arguments, words):
    status, out, err = octavo("plan", "llama-3.1-8b", "--hardware", "h100-sxm", *arguments)
    assert status == 1 and out == "" and words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--years", 3), "--purchase"),
        (("--purchase", 3000, "--price", 2), "leave one out"),
        (("--most-devices", 4), "--cheapest"),
        (("--confirm",), "--slo"),
        (("--disaggregate",), "--slo"),
        (("--disaggregate", "--slo", "tpot=50", "--cheapest"), "leave out --cheapest"),
    ],
)
def test_flags_that_say_nothing_are_refused(octavo, arguments, words):
    status, _, err = octavo("plan", *SMALL, *arguments)
    assert status == 2 and words in err


def test_a_model_that_is_not_known_comes_with_those_that_are_near(octavo):
    status, _, err = octavo("plan", "llama-3.1-9b", "--hardware", "l4")
    assert status == 1 and "llama-3.1-8b" in err


def test_advice(document, octavo):
    status, found = document("advise", *SMALL, "--concurrency", 4)
    assert status == 0 and found["model"] == "llama-3.1-8b"
    keys = {"what", "why", "gain", "measured_gain", "measured", "not_measured"}
    assert all(each.keys() == keys for each in found["advice"])
    assert all(each["measured_gain"] is None for each in found["advice"])
    assert all(
        each.keys() == {"question", "answer", "because", "then"} for each in found["decisions"]
    )
    status, out, _ = octavo("advise", *SMALL, "--concurrency", 4)
    assert status == 0 and found["decisions"][0]["question"] in out
    assert found["advice"][0]["what"] in out


def test_pictures(octavo, tmp_path):
    picture = tmp_path / "plan.svg"
    asked = ("plan", *SMALL, "--rate", 5, "--slo", "tpot=50")
    for search in ((), ("--cheapest", "--most-devices", 1)):
        assert octavo(*asked, *search, "--plot", picture)[0] == 0
        assert {"weights", "limit 50 ms", "output tokens/s, all devices"} <= set(texts_of(picture))
        picture.unlink()


# -- this machine, calibrated ---------------------------------------------------------------------


@pytest.fixture
def calibrated(tiny_model, tmp_path, monkeypatch):
    """A model that was calibrated on a machine without a GPU."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(this_machine, "_measure", lambda: RATES)
    monkeypatch.setattr(this_machine.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    keep_calibration(tiny_model)
    return tiny_model


@pytest.mark.parametrize(
    "flags, source",
    [
        ((), "measured"),
        (("--hardware", "auto:2"), "measured"),
        (("--isl", 200, "--concurrency", 36), "extrapolated"),
        (("--kv-cache-dtype", "bf16"), "measured"),
        (("--kv-cache-dtype", "int8"), "roofline"),
        (("--quantization", "int4"), "roofline"),
        (("--profile", "llama.cpp"), "roofline"),
        (("--hardware", "epyc-genoa"), "roofline"),
    ],
)
def test_a_model_that_was_calibrated_is_planned_as_it_was_measured(
    document, calibrated, flags, source
):
    _, found = document("plan", calibrated, "--isl", 20, "--osl", 4, *flags)
    assert found["decode_step_ms"]["source"] == source


def test_a_calibration_with_other_threads_does_not_count(document, calibrated, tmp_path):
    (kept,) = (tmp_path / "calibrations").iterdir()
    kept.unlink()
    keep_calibration(calibrated, threads=997)
    _, found = document("plan", calibrated, "--isl", 20, "--osl", 4)
    assert found["decode_step_ms"]["source"] == "roofline"


def test_advice_is_tried_out(document, octavo, calibrated):
    arguments = ("--isl", 40, "--osl", 4, "--concurrency", 2, "--measure", "--max-num-seqs", 8)
    status, found = document("advise", calibrated, *arguments, "--try", calibrated)
    assert status == 0
    by_name = {each["what"]: each for each in found["advice"]}
    again = by_name[f"run {calibrated}"]
    gain = again["measured_gain"]
    assert 0 < gain["low"] <= gain["value"] <= gain["high"] and gain["source"] == "measured"
    assert again["measured"]["num_turns"] >= 3
    assert again["measured"]["before"].keys() == {"output_tps", "ttft_ms", "e2e_ms"}
    for each in found["advice"]:
        assert (each["measured_gain"] is None) == (each["not_measured"] is not None), each


def test_who_measures_beside_others_is_told(octavo, calibrated, monkeypatch):
    monkeypatch.setattr(this_machine.os, "getloadavg", lambda: (50.0, 0.0, 0.0))
    status, out, err = octavo("advise", calibrated, "--isl", 8, "--osl", 2, "--measure")
    assert status == 0 and "measured, " in out and "a load of 50.0" in err


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--hardware", "l4"), "--hardware auto"),
        (("--profile", "vllm"), "not vllm"),
        (("--quantization", "int4"), "--quantization"),
        (("--tp", 2), "--tp"),
    ],
)
def test_only_what_is_here_can_be_tried_out(octavo, flags, words):
    status, _, err = octavo("advise", "llama-3.1-8b", "--measure", *flags)
    assert status == 2 and words in err and len(err.splitlines()) == 1


def test_candidates_say_nothing_where_nothing_is_tried(octavo):
    status, _, err = octavo("advise", *SMALL, "--try", "other.gguf")
    assert status == 2 and "--measure" in err


def test_a_plan_is_exported(octavo, tmp_path):
    path = tmp_path / "page.json"
    status, _, err = octavo("plan", *SMALL, "--price", 3, "--export", path)
    found = json.loads(path.read_text())
    assert status == 0 and str(path) in err
    assert found["money"]["fixed_usd_per_hour"]["value"] == 3
    assert found["model"]["name"] == "llama-3.1-8b" and len(found["golden"]["steps"]) >= 200
    status, _, err = octavo("plan", *SMALL, "--export", path / "below-a-file.json")
    assert status == 1 and "cannot be written" in err
    arguments = ("--hardware", "l4", "--cheapest", "--rate", 1, "--export", path)
    status, *_ = octavo("plan", "qwen3-0.6b", *arguments)
    assert status == 0 and json.loads(path.read_text())["device"]["name"] == "L4"


@pytest.mark.parametrize("flag", ["--tp", "--tensor-parallel-size"])
def test_processors_share_a_model_by_outputs_and_uneven_heads(document, flag):
    """smollm2-135m has 9 query heads and 3 KV heads."""
    one, two = (
        document("plan", "smollm2-135m", "--hardware", f"epyc-genoa:{count}", flag, count)[1]
        for count in (1, 2)
    )
    assert one["exchange"] is None and one["deployment"]["scheme"] == "sum"
    assert two["deployment"] | {"tp": 2, "num_devices": 2, "scheme": "gather"} == two["deployment"]
    assert two["exchange"] == {
        "bytes_per_token": 4 * 30 * (9 * 64 + 576 + 1536 + 576),
        "bytes_per_logits_row": 4 * 49_152,
        "meetings": 4 * 30,
    }
    assert two["kv_bytes_per_token_per_rank"] == one["kv_bytes_per_token"] * 2 / 3
    faster = one["decode_step_ms"]["value"] / two["decode_step_ms"]["value"]
    assert 1.0 < faster < 2  # 3 % on so small a model: it is launches, meetings, and 5 of 9 heads
    assert two["memory"]["weights_bytes"] == pytest.approx(one["memory"]["weights_bytes"] / 2, 0.03)


def test_auto_is_a_rank_for_each_processor(document):
    _, found = document("plan", "qwen2.5-0.5b", "--hardware", "epyc-genoa:2", "--tp", "auto")
    assert found["deployment"]["tp"] == 2


def test_tables_of_ranks_that_share_memory(octavo):
    flags = ("--hardware", "xeon-spr:2", "--tp", 2, "--memory", "--roofline")
    status, out, _ = octavo("plan", "smollm2-135m", *flags)
    assert status == 0 and "KV of a token" in out and "15.0 KiB" in out


# -- saved settings -------------------------------------------------------------------------------

SAVED = (
    "--hardware epyc-turin --tp 2 --concurrency 4 --isl 64 --osl 16 "
    "--max-num-seqs 7 --max-model-len 256"
)


@pytest.mark.parametrize("name", ["server.yaml", "server.toml"])
def test_a_server_reads_what_a_plan_has_saved(octavo, tiny_model, tmp_path, monkeypatch, name):
    from octavo.cost.engine_profile import Limits
    from octavo.planner import Traffic, plan
    from octavo.planner.serve_settings import serve_settings
    from octavo.settings.engine import EngineArgs

    path = tmp_path / name
    status, _, err = octavo("plan", tiny_model, *SAVED.split(), "--save", path)
    assert status == 0 and f"written to {path}" in err
    served = []
    monkeypatch.setattr("octavo.server.run.serve", lambda *args: served.append(args) or 0)
    assert octavo("serve", "--config", path)[0] == 0
    ((args, settings, _),) = served
    limits = Limits(max_num_seqs=7, max_model_len=256)
    found = plan(str(tiny_model), "epyc-turin", Traffic(64, 16, concurrency=4), tp=2, limits=limits)
    assert args == EngineArgs.from_kwargs(
        **{each.name: each.value for each in serve_settings(found)}
    )
    assert args.tensor_parallel_size == 2 and args.max_num_seqs == 7


def test_a_saved_file_gives_reasons(octavo, tiny_model, tmp_path):
    path = tmp_path / "server.yaml"
    octavo("plan", tiny_model, *SAVED.split(), "--save", path)
    text = path.read_text()
    assert text.startswith("# Settings for `octavo serve --config`")
    assert "# 2 ranks share each layer\ntensor_parallel_size: 2\n" in text
    octavo("plan", tiny_model, *SAVED.split(), "--save", path)
    assert path.read_text() == text  # the same flags, the same bytes


def test_what_is_not_saved(octavo, tmp_path):
    path = tmp_path / "server.yaml"
    status, _, err = octavo("plan", "llama-3.1-70b", "--hardware", "h100-sxm", "--save", path)
    assert status == 2 and "is not written: the plan is not feasible" in err
    status, _, err = octavo("plan", *SMALL, "--save", path)
    assert status == 1 and "leave out --profile" in err
    assert not path.exists()
    status, _, err = octavo("plan", "llama-3.1-8b", "--save", tmp_path / "server.txt")
    assert status == 1 and "written as .yaml or .toml" in err
    folder = tmp_path / "file" / "server.yaml"
    folder.parent.write_text("")
    status, _, err = octavo("plan", "llama-3.1-8b", "--hardware", "h100-sxm", "--save", folder)
    assert status == 1 and "cannot be written" in err
