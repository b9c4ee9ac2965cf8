"""``octavo bench latency``, ``throughput`` and ``startup`` from end to end, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from octavo.bench import record
from octavo.bench.noise import NoiseProbe
from octavo.bench.offline import startup
from octavo.bench.offline.startup import StartTimes
from octavo.cli import main
from octavo.kernels.cpu.library import runnable

COMMANDS = ("latency", "throughput", "startup")
KERNELS = [
    "reference",
    pytest.param(
        "native", marks=pytest.mark.skipif(not runnable(), reason="no native library was built")
    ),
]


@pytest.fixture(autouse=True)
def noisy_machine(monkeypatch):
    """Its memory is slower after each run than before it."""
    rates = iter([30.0, 10.0] * 100)
    monkeypatch.setattr(record, "probe_machine", lambda threads: NoiseProbe(next(rates), 200.0))


@pytest.fixture
def bench(capsys, tiny_model):
    """``bench("latency", …)``: status, stdout and stderr."""

    def run(command: str, *arguments: object, model: object = tiny_model) -> tuple[int, str, str]:
        status = main(["bench", command, str(model), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SMALL = {
    "latency": ("--input-len", 20, "--output-len", 4, "--repeat", 2, "--threads", 1),
    "throughput": ("--num-prompts", 3, "--input-len", 9, "--output-len", 4, "--repeat", 2),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("command", SMALL)
def test_json_on_stdout_and_in_a_file(bench, command, kernels, tmp_path):
    file = tmp_path / "results" / "it.json"
    arguments = (*SMALL[command], "--kernels", kernels, "--json", "--output", file)
    status, out, err = bench(command, *arguments)
    assert status == 0
    document = json.loads(out)
    assert json.loads(file.read_text()) == document
    assert document["engine"]["kernels"] == kernels
    settings = document["run"]["settings"]
    assert settings["benchmark"] == command and settings["repeat"] == 2
    assert settings["engine"]["kernels"] == kernels
    assert "warning: memory bandwidth moved from 30 to 10 GB/s" in err.splitlines()
    assert document["run"]["warnings"][0].startswith("memory bandwidth moved")


@pytest.mark.parametrize("command", SMALL)
def test_a_picture_of_the_latencies(bench, command, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "it.svg"
    assert bench(command, *SMALL[command], "--plot", picture)[0] == 0
    text = picture.read_text()
    assert "TTFT, ms" in text and "TPOT, ms" in text


def test_latency_as_a_table(bench):
    status, out, err = bench("latency", *SMALL["latency"])
    assert status == 0 and "warning: memory" in err
    for words in ("batch 1, 20 prompt and 4 output tokens, 2 times", "TTFT", "TPOT", "median"):
        assert words in out
    assert "Roofline: " in out and "MBU" in out and "MFU" in out
    assert "Weights" in out and "float32" in out
    assert out.splitlines()[-1].startswith("octavo ") and "30 GB/s read" in out
    assert max(map(len, out.splitlines())) <= 120


def test_throughput_as_a_table_and_as_vllm_says_it(bench):
    status, out, _ = bench("throughput", *SMALL["throughput"], "--max-num-seqs", 2)
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("Throughput: "))
    words = line.split()
    assert words[2:3] + words[4:6] + words[7:9] == [
        "requests/s,", "total", "tokens/s,", "output", "tokens/s"
    ]  # fmt: skip
    assert float(words[3]) > float(words[6]) > 0
    assert "0 preemptions" in out and "KV blocks in use" in out


def test_throughput_of_a_file(bench, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "how?", "output_len": 3}\n{"prompt": "why?", "output_len": 2}\n')
    status, out, _ = bench("throughput", "--dataset", file, "--repeat", 1, "--json")
    assert status == 0
    document = json.loads(out)
    assert document["num_requests"] == 2 and document["num_output_tokens"] == 5
    assert document["run"]["settings"]["dataset"] == str(file)


def test_a_bad_line_of_a_file_is_named(bench, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "how?"}\n{"prompt": 7}\n')
    status, out, err = bench("throughput", "--dataset", file, "--dataset-name", "jsonl")
    assert status == 1 and out == ""
    assert "questions.jsonl:2: prompt is neither" in err


def test_startup(bench, monkeypatch, tmp_path):
    times = iter([9.0, 1.0, 2.0, 3.0, 5.0])

    def start_once(arguments, variables=None):
        assert arguments["threads"] == 1
        phases = (0.25, 0.1, 0.2, 0.3, 0.4, 0.5)
        start = StartTimes(next(times), 7.0, *phases, 2**20)
        return start, {"device": "cpu", "kernels": "native"}

    monkeypatch.setattr(startup, "start_once", start_once)
    flags = ("--threads", 1, "--num-iters-cold", 1)
    status, out, _ = bench("startup", *flags)
    assert status == 0
    for phase in ("interpreter and imports", "header", "tokenizer", "weights", "program"):
        assert f"\n {phase} " in out
    assert "1 cold and 3 warm starts" in out and "peak memory 1.0 MiB" in out
    assert "\ncold: packed weights not there" in out and "\nwarm: " in out

    times = iter([9.0, 1.0, 2.0, 3.0, 5.0])
    picture = tmp_path / "starts.svg"
    flags += ("--plot", picture) if importlib.util.find_spec("matplotlib") else ()
    document = json.loads(bench("startup", *flags, "--json")[1])
    if "--plot" in flags:
        assert "cold, first token" in picture.read_text()
    assert (document["cold_s"], document["warm_s"], document["first_token_s"]) == (5.0, 2.0, 7.0)


def test_a_large_batch_gets_room(bench):
    flags = ("--input-len", 2, "--output-len", 2, "--repeat", 1, "--warmup", 0, "--json")
    status, out, _ = bench("latency", "--batch-size", 70, *flags)
    assert status == 0
    assert json.loads(out)["engine"]["max_num_seqs"] == 70


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("latency", ("--batch-size", 3, "--max-num-seqs", 2), "is more than --max-num-seqs 2"),
        ("latency", ("--batch-size", 0), "'0' is no integer of at least 1"),
        ("latency", ("--warmup", -1), "'-1' is no integer of at least 0"),
        ("latency", ("--block-size", 0), "block_size must be an integer of at least 1"),
        ("throughput", ("--dataset", "nowhere.json"), "there is no such file"),
        ("throughput", ("--dataset-name", "sharegpt"), "needs the file: --dataset FILE"),
        ("throughput", ("--repeat", "x"), "'x' is no integer"),
        ("startup", ("--num-iters-cold", 0), "'0' is no integer of at least 1"),
        ("startup", ("--pipeline-parallel-size", 0), "pipeline_parallel_size must be an integer"),
    ],
)
def test_wrong_usage(bench, command, flags, words):
    status, out, err = bench(command, *flags)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_lengths_belong_to_random_prompts(bench, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "how?"}\n')
    status, _, err = bench("throughput", "--dataset", file, "--input-len", 4)
    assert status == 2 and "--input-len is for random prompts" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(bench, command, tmp_path):
    status, out, err = bench(command, model=tmp_path / "nowhere.gguf")
    assert (status, out) == (1, "")
    assert err.startswith("octavo: error: there is no file or folder")


def test_too_long_for_the_model(bench):
    status, _, err = bench("latency", "--input-len", 250, "--output-len", 10)
    assert status == 1
    assert "are 260, and the engine's context (max_model_len) is 256" in err


def test_a_result_that_cannot_be_written(bench, tmp_path):
    (tmp_path / "file").write_text("")
    status, out, err = bench("latency", *SMALL["latency"], "--output", tmp_path / "file" / "x")
    assert status == 1 and "cannot be written" in err
    assert "TTFT" in out  # and is not lost


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_light_and_has_examples(command):
    code = (
        "import sys\nfrom octavo.cli import main\n"
        f"status = main(['bench', {command!r}, '--help'])\n"
        "print(*sys.modules, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"octavo bench {command}" in done.stdout and "examples:" in done.stdout
    assert not {"torch", "numpy", "rich"} & set(done.stderr.split())
