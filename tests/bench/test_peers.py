"""Reading the peers' outputs, taking turns, and the arithmetic of the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench import noise, record
from octavo.bench.peers import child, compare, contenders, llama_bench, report, workers
from octavo.bench.peers.workers.workloads import WORKLOADS, PeerWorkload

ROOT = Path(__file__).parents[2]
WORKERS = Path(workers.__file__).parent
sys.path.insert(0, str(WORKERS))  # as the worker scripts find it

import worker  # noqa: E402

# As printed by the version that setup_llama_cpp builds, shortened.
LLAMA_BENCH = """[
  {
    "build_commit": "0c1e570",
    "build_number": 1,
    "cpu_info": "AMD EPYC",
    "model_type": "llama 256M Q4_0",
    "n_threads": 2,
    "type_k": "f16",
    "flash_attn": 1,
    "n_prompt": %d,
    "n_gen": %d,
    "n_depth": %d,
    "avg_ts": 843.760932,
    "samples_ns": [ 602425760, 611252338 ],
    "samples_ts": [ 849.897, 837.625 ]
  }
]
"""
BATCHED_BENCH = """
{"n_kv_max": 8192, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 128, "tg": 127, "pl": 32, \
"n_kv": 8160, "t_pp": 4.000000, "speed_pp": 1024.0, "t_tg": 8.128000, "speed_tg": 500.0, \
"t": 12.128, "speed": 672.8}

llama_perf_context_print:        load time =     150.00 ms
"""


# -- what the peers print ------------------------------------------------------------------------


def test_llama_bench_gives_every_repetition():
    prefill = llama_bench.parse(WORKLOADS["prefill"], LLAMA_BENCH % (512, 0, 0))
    assert prefill == [{"prefill_tps": 849.897}, {"prefill_tps": 837.625}]
    decode = llama_bench.parse(WORKLOADS["decode"], LLAMA_BENCH % (0, 128, 128))
    assert decode == [{"decode_tps": 849.897}, {"decode_tps": 837.625}]
    assert llama_bench.about(LLAMA_BENCH % (0, 1, 0))["build_commit"] == "0c1e570"


@pytest.mark.parametrize("output", ["", "error: failed to load model", "[]", "[{}, {}]"])
def test_other_output_than_llama_benchs_json_is_refused(output):
    with pytest.raises(ValueError, match="not llama-bench's JSON"):
        llama_bench.parse(WORKLOADS["prefill"], output)


def test_a_result_of_another_test_is_refused():
    with pytest.raises(ValueError, match="something else"):
        llama_bench.parse(WORKLOADS["prefill"], LLAMA_BENCH % (256, 0, 0))


def test_batched_bench_is_counted_over_the_whole_run():
    (figures,) = llama_bench.parse(WORKLOADS["batch-32"], BATCHED_BENCH)
    assert figures["output_tps"] == pytest.approx(32 * 128 / 12.128)
    assert figures["decode_tps"] == pytest.approx(500)
    assert figures["prefill_tps"] == pytest.approx(1024)


@pytest.mark.parametrize("output", ["", BATCHED_BENCH * 2, BATCHED_BENCH.replace("32", "16")])
def test_batched_bench_without_the_one_result_is_refused(output):
    with pytest.raises(ValueError, match="no result for"):
        llama_bench.parse(WORKLOADS["batch-32"], output)


def test_the_commands_ask_for_the_same_work_of_llama_cpp():
    programs = llama_bench.LlamaPrograms(Path("bin"), 2)
    command = programs.bench_command(Path("m"), WORKLOADS["decode-1k"])
    assert {"-p": "0", "-n": "128", "-d": "1024", "-t": "2"}.items() <= options(command).items()
    command = programs.bench_command(Path("m"), WORKLOADS["batch-64"])
    wanted = {"-npp": "128", "-ntg": "127", "-npl": "64"}
    assert wanted.items() <= options(command).items()
    assert int(options(command)["-c"]) >= 64 * (128 + 127)


def options(command):
    return dict(zip(command[1:], command[2:], strict=False))


# -- a worker ------------------------------------------------------------------------------------


class CountingEngine:
    """A second for each prompt, a tenth for each further token."""

    vocab_size = 5000

    def __init__(self, says_decode_time=False):
        self.calls = []
        self.says_decode_time = says_decode_time

    def generate(self, prompts, max_tokens):
        self.calls.append((prompts, max_tokens))
        decode_s = 0.1 * (max_tokens - 1)
        return worker.Timing(len(prompts) + decode_s, 0.05 if self.says_decode_time else None)


def test_a_worker_takes_the_prompts_off_the_time_of_decoding():
    workload = PeerWorkload("w", "", "decode", 1, 8, 11, 2)
    assert worker.measure(CountingEngine(), workload, 0) == [{"decode_tps": pytest.approx(10)}] * 2
    exact = worker.measure(CountingEngine(says_decode_time=True), workload, 0)
    assert exact == [{"decode_tps": pytest.approx(200)}] * 2
    batch = worker.measure(CountingEngine(), PeerWorkload("w", "", "batch", 4, 8, 11, 1), 0)
    assert batch[0]["output_tps"] == pytest.approx(4 * 11 / 5)
    assert batch[0]["decode_tps"] == pytest.approx(4 * 10 / 1)
    assert batch[0]["prefill_tps"] == pytest.approx(4 * 8 / 4)


def test_no_prompt_is_seen_twice_and_all_engines_see_the_same():
    engine, other = CountingEngine(), CountingEngine()
    workload = PeerWorkload("w", "", "batch", 3, 16, 4, 2)
    for seed in range(3):
        worker.measure(engine, workload, seed)
        worker.measure(other, workload, seed)
    assert engine.calls == other.calls
    prompts = [tuple(prompt) for listed, _ in engine.calls for prompt in listed]
    assert len(set(prompts)) == len(prompts) == 3 * 3 * (1 + 2 * 2)
    assert all(1000 <= token < 5000 for prompt in prompts for token in prompt)


def test_an_answer_of_another_length_is_an_error():
    worker.check_lengths([[1, 2], [3, 4]], 2)
    with pytest.raises(RuntimeError, match=r"\[1, 2\] tokens instead of 2"):
        worker.check_lengths([[1, 2], [3]], 2)


WORKER = """
import os, sys, threading
sys.path.insert(0, {peers!r})
import worker

def spin():
    while True:
        pass

class Engine:
    vocab_size = 100
    def generate(self, prompts, max_tokens):
        print("an engine that talks")
        os.write(1, b"more talk")
        if len(prompts) == 13:
            raise ValueError("thirteen")
        if len(prompts) == 14:
            os._exit(3)
        return worker.Timing(0.5)
    def about(self):
        return {{"version": "1"}}

def load(settings):
    if settings["fail"]:
        raise OSError("no such model")
    threading.Thread(target=spin, daemon=True).start()
    return Engine()

worker.serve(load)
"""


@pytest.fixture
def start_worker(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(WORKER.format(peers=str(WORKERS)))
    started = []

    def start(fail=False):
        command = [sys.executable, str(script), json.dumps({"fail": fail})]
        started.append(child.Worker(command, child.environment(), tmp_path / "log", 30))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_worker_answers_and_does_not_run_while_it_waits(start_worker):
    running = start_worker()
    assert running.about == {"version": "1"} and running.start_s > 0
    prefill = PeerWorkload("w", "", "prefill", 1, 8, 1, 2)
    assert running.measure(prefill, 0) == [{"prefill_tps": 16.0}] * 2
    begun = time.monotonic()
    time.sleep(0.3)  # the engine spins, and would use all of this
    waited = time.monotonic() - begun
    assert running.measure(prefill, 1) == [{"prefill_tps": 16.0}] * 2
    assert running.idle_cpu_s < waited / 3
    with pytest.raises(child.ChildError, match="ValueError: thirteen"):
        running.measure(PeerWorkload("w", "", "prefill", 13, 8, 1, 1), 0)
    assert running.measure(prefill, 2) == [{"prefill_tps": 16.0}] * 2


def test_a_worker_that_dies_or_cannot_load_is_an_error_that_names_its_log(start_worker):
    running = start_worker()
    with pytest.raises(child.ChildError, match="the worker ended; see .*log"):
        running.measure(PeerWorkload("w", "", "prefill", 14, 8, 1, 1), 0)
    with pytest.raises(child.ChildError, match="OSError: no such model; see .*log"):
        start_worker(fail=True)


def test_closing_a_stopped_worker_ends_it(start_worker):
    running = start_worker()
    running.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(running.group, 0)


def test_a_stopped_worker_ends_with_the_process_that_started_it(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(WORKER.format(peers=str(WORKERS)))
    parent = f"""
import sys, time, pathlib
sys.path.insert(0, {str(ROOT)!r})
from octavo.bench.peers import child
one = child.Worker(
    [sys.executable, {str(script)!r}, '{{"fail": false}}'],
    child.environment(), pathlib.Path({str(tmp_path / "log")!r}), 30,
)
print(one.group, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        group = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(state == "Z" for state in states_of(group)):
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("the worker outlived the process that started it")


def states_of(group):
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            yield fields[0]


def test_the_first_byte_is_timed_and_failure_is_reported():
    slow_end = "import time; print('x', flush=True); time.sleep(0.5)"
    command, begun = [sys.executable, "-c", slow_end], time.monotonic()
    first = child.start_to_first_byte(command, os.environ, 30)
    subprocess.run(command, check=True, capture_output=True)
    assert first < (time.monotonic() - begun) / 2  # it does not wait for the end
    with pytest.raises(child.ChildError, match="no luck"):
        child.start_to_first_byte([sys.executable, "-c", "exit('no luck')"], os.environ, 30)


def test_settings_of_thread_pools_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OCTAVO_ISA", "avx2")
    env = child.environment(OMP_NUM_THREADS="2")
    assert "OMP_WAIT_POLICY" not in env and env["OMP_NUM_THREADS"] == "2"
    assert env["OCTAVO_ISA"] == "avx2"


# -- taking turns --------------------------------------------------------------------------------


class FakeEngine:
    group, idle_cpu_s = None, 0.0

    def __init__(self, name, journal, fails=False, gives=1):
        self.name, self.journal, self.fails, self.gives = name, journal, fails, gives

    def measure(self, workload, seed):
        self.journal.append((seed, workload.name, self.name))
        if self.fails:
            raise child.ChildError("out of order")
        return [{"decode_tps": 10.0 + seed, "prefill_tps": 5.0}] * self.gives


def run_comparison(rounds, workloads, *engines):
    comparison = compare.TurnTaker(None, lambda line: None)
    comparison.run(rounds, [WORKLOADS[name] for name in workloads], engines)
    return comparison


def test_engines_take_turns():
    journal = []
    engines = [FakeEngine(name, journal) for name in "ABC"]
    comparison = run_comparison(2, ["decode", "prefill"], *engines)
    order = [(n, w, e) for n in (0, 1) for w in ("decode", "prefill") for e in "ABC"]
    assert journal == order
    assert [(s.round, s.workload, s.contender) for s in comparison.samples] == order


def test_an_engine_that_fails_is_not_asked_again_and_the_others_go_on():
    journal = []
    engines = FakeEngine("A", journal), FakeEngine("B", journal, fails=True)
    comparison = run_comparison(3, ["decode"], *engines)
    assert [who for _, _, who in journal] == ["A", "B", "A", "A"]
    assert [s.contender for s in comparison.samples] == ["A", "A", "A"]
    assert any("out of order" in warning for warning in comparison.warnings)


def test_nothing_measured_is_no_sample():
    assert run_comparison(1, ["decode"], FakeEngine("A", [], gives=0)).samples == []


def test_engines_are_chosen_by_name():
    assert contenders.choose(["octavo"]) == ["octavo:file", "octavo:bf16"]
    assert contenders.choose(["llama.cpp"]) == ["llama.cpp:file", "llama.cpp:q4_0"]
    assert contenders.choose(["llama.cpp:bf16", "vllm"]) == ["llama.cpp:bf16", "vllm:bf16"]
    assert contenders.choose(["transformers"]) == ["transformers:bf16"]
    with pytest.raises(ValueError, match="unknown engine 'lama'"):
        contenders.choose(["lama"])


@pytest.mark.parametrize("has_source_tree", [True, False])
def test_a_peer_that_is_not_set_up_says_how_to_get_it(tmp_path, monkeypatch, has_source_tree):
    settings = contenders.PeerSettings(tmp_path / "peers", tmp_path / "m.Q4_1.gguf", 2)
    setup = tmp_path / "benchmarks" / "peers"
    monkeypatch.setattr(contenders, "SETUP", setup)
    if has_source_tree:
        setup.mkdir(parents=True)
    for name, script in (("llama.cpp:file", "setup_llama_cpp"), ("vllm:bf16", "setup_vllm")):
        if has_source_tree:
            (setup / script).touch()
        message = contenders.why_missing(name, settings)
        assert (f"run {setup / script} --dir {settings.folder}" in message) is has_source_tree
        assert ("benchmarks/peers" in message) is has_source_tree  # a wheel has no such folder
        assert str(settings.folder) in message and ".." not in message
    assert contenders.why_missing("octavo:file", settings) is None


@pytest.mark.skipif(not contenders.SETUP.exists(), reason="needs the source tree")
def test_the_scripts_that_set_up_peers_are_there():
    for script in ("setup_llama_cpp", "setup_vllm"):
        assert (contenders.SETUP / script).stat().st_mode & 0o111


def test_a_script_below_the_current_folder_is_named_as_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "SETUP", tmp_path / "benchmarks" / "peers")
    contenders.SETUP.mkdir(parents=True)
    (contenders.SETUP / "setup_vllm").touch()
    monkeypatch.chdir(tmp_path)
    folder = contenders.default_folder() / "not" / "there"
    message = contenders.how_to_install("vllm", folder)
    assert message == f"run benchmarks/peers/setup_vllm --dir {folder}"


def test_what_makes_the_bfloat16_folder_is_named_where_it_is_missing(tmp_path, monkeypatch):
    settings = contenders.PeerSettings(tmp_path, tmp_path / "m.Q4_1.gguf", 2)
    monkeypatch.setattr(contenders, "find_spec", lambda package: None if package == "gguf" else 1)
    assert "install gguf beside octavo" in contenders.why_missing("octavo:bf16", settings)
    settings.gguf.touch()
    made = contenders.hf_folder(settings)
    made.mkdir(parents=True)
    (made / "config.json").touch()
    assert contenders.why_missing("octavo:bf16", settings) is None


@pytest.mark.parametrize(
    ("stem", "weights"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "q4_1"),
        ("gemma-3-270m-q4_k_m", "q4_k_m"),
        ("model-BF16", "bf16"),
        ("model.IQ4_XS", "iq4_xs"),
        ("model", "file"),
    ],
)
def test_weights_are_named_after_the_file(stem, weights):
    assert contenders.file_weights(Path(f"{stem}.gguf")) == weights


# -- the table -----------------------------------------------------------------------------------


def samples(workload, figure, **rates):
    return [
        report.TurnSample(number, workload, name.replace("_", ":"), [{figure: rate}])
        for name, listed in rates.items()
        for number, rate in enumerate(listed)
        if rate is not None
    ]


def test_ratios_are_of_medians_and_of_rounds():
    measured = samples("decode", "decode_tps", octavo_file=[300, 400, 500], peer_q=[100, 200, 400])
    ours, theirs = report.summarize(measured, ["octavo:file"])
    assert (ours.median, ours.min, ours.max, ours.num_samples) == (400, 300, 500, 3)
    assert ours.ratios == {}
    ratio = theirs.ratios["octavo:file"]
    assert ratio.of_medians == 2.0 and ratio.by_round == [3.0, 2.0, 1.25]
    assert str(ratio) == "2.00 × (1.25 – 3.00)"


def test_less_time_is_faster():
    measured = samples("start", "start_s", octavo_file=[2.0], vllm_bf16=[60.0])
    _, theirs = report.summarize(measured, ["octavo:file"])
    assert theirs.ratios["octavo:file"].of_medians == 30.0


def test_rounds_are_paired_by_number():
    measured = samples("decode", "decode_tps", octavo_file=[10, 20, 30], peer_q=[None, 10, None])
    _, theirs = report.summarize(measured, ["octavo:file"])
    assert theirs.ratios["octavo:file"].by_round == [2.0]


def test_a_rounds_figure_is_the_median_of_its_repetitions():
    repeats = [{"decode_tps": rate} for rate in (1.0, 5.0, 4.0)]
    (row,) = report.summarize([report.TurnSample(0, "decode", "a:b", repeats)], [])
    assert row.median == 4.0


def test_noise_raises_doubts():
    quiet = report.TurnSample(0, "decode", "a:b", [{}], 1.0, 60.0, 66.0, 0.02)
    assert report.doubts(quiet) == []
    moved = report.TurnSample(0, "decode", "a:b", [{}], 1.0, 60.0, 40.0, None)
    assert report.doubts(moved) == ["memory bandwidth moved from 60 to 40 GB/s"]
    busy = report.TurnSample(0, "decode", "a:b", [{}], 1.0, 60.0, 60.0, 0.8)
    assert report.doubts(busy) == ["other processes kept 0.8 processors busy"]


# -- a whole comparison, of made-up engines --------------------------------------------------------


class ReadyEngine(FakeEngine):
    weights = "file"

    def start(self):
        self.journal.append("start")
        if self.name == "vllm:bf16":
            raise child.ChildError("no memory")
        return {"version": "1"}

    def measure(self, workload, seed):
        self.journal.append((workload.name, seed))
        if self.name == "octavo:interrupted" and seed == 1:
            raise KeyboardInterrupt
        if self.name == "octavo:broken":
            raise SystemExit(143)
        return [{"decode_tps": 30.0 if self.name.startswith("octavo") else 10.0}]

    def close(self):
        self.journal.append("close")


@pytest.fixture
def compare_fakes(monkeypatch, tmp_path):
    """Compare engines that are made up; what happened to each is in the journals, by name."""
    journals = {}

    def make(name, settings):
        return ReadyEngine(name, journals.setdefault(name, []))

    quiet = noise.NoiseProbe(read_gbytes_per_s=10.0, gemm_gflops=100.0)
    monkeypatch.setattr(record, "probe_machine", lambda threads: quiet)
    monkeypatch.setattr(contenders, "make", make)
    monkeypatch.setattr(
        contenders, "why_missing", lambda name, _: "run it" if name == "llama.cpp:bf16" else None
    )

    def run(*names, rounds=1):
        settings = contenders.PeerSettings(tmp_path, tmp_path / "m.gguf", 1)
        plan = compare.ComparisonPlan(names, [WORKLOADS["decode"]], rounds)
        return compare.compare(plan, settings, lambda line: None)

    return run, journals


def test_the_document_has_everything_that_is_known(compare_fakes):
    run, journals = compare_fakes
    result = run("octavo:file", "llama.cpp:file", "llama.cpp:bf16", "vllm:bf16", rounds=2)
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert [row["contender"] for row in document["summary"]] == ["octavo:file", "llama.cpp:file"]
    assert document["summary"][1]["ratios"]["octavo:file"]["of_medians"] == 3.0
    assert document["engines"]["octavo:file"] == {"weights": "file", "version": "1"}
    left_out = {"llama.cpp:bf16": "to have it, run it", "vllm:bf16": "no memory"}
    assert document["left_out"] == left_out
    assert document["idle_cpu_s"] == {"octavo:file": 0.0, "llama.cpp:file": 0.0}
    turns = document["run"]["samples"]["turns"]
    assert len(turns) == 4 and turns[0]["repeats"] == [{"decode_tps": 30.0}]
    assert turns[0]["bandwidth_before"] > 0 and turns[0]["bandwidth_after"] > 0
    assert document["run"]["settings"]["rounds"] == 2 and document["run"]["noise"]["after"]
    assert journals["vllm:bf16"] == ["start", "close"]
    assert all(journals[name][-1] == "close" for name in ("octavo:file", "llama.cpp:file"))


@pytest.mark.parametrize("absent", ["llama.cpp:bf16", "vllm:bf16"])
def test_octavo_alone_is_no_comparison(compare_fakes, absent):
    """Neither where no other engine is here, nor where none of them starts."""
    run, journals = compare_fakes
    with pytest.raises(BenchmarkError, match="nothing to compare octavo with.*(run it|no memory)"):
        run("octavo:file", absent)
    is_known = absent == "llama.cpp:bf16"  # before anything was started
    assert journals.get("octavo:file", []) == ([] if is_known else ["start", "close"])


def test_an_interrupted_comparison_keeps_what_it_has(compare_fakes):
    run, journals = compare_fakes
    result = run("octavo:interrupted", rounds=3)
    assert [row.num_samples for row in result.rows] == [1]
    assert any("interrupted" in warning for warning in result.run["warnings"])
    assert journals["octavo:interrupted"][-1] == "close"


def test_engines_are_ended_when_the_comparison_is(compare_fakes):
    run, journals = compare_fakes
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        run("llama.cpp:file", "octavo:broken")
    assert journals["llama.cpp:file"][-1] == journals["octavo:broken"][-1] == "close"
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_to_measure_is_an_error_that_says_why(compare_fakes):
    run, _ = compare_fakes
    with pytest.raises(BenchmarkError, match="vllm:bf16: no memory"):
        run("vllm:bf16", "llama.cpp:bf16")


# -- how quiet it is -----------------------------------------------------------------------------


def test_processor_time_of_the_machine_leaves_out_idleness():
    ticks = os.sysconf("SC_CLK_TCK")
    assert noise.parse_machine_cpu_s("cpu  100 20 30 9999 8888 4 5 6 0 0\n") == 165 / ticks


def test_processor_time_of_a_group(tmp_path):
    def process(pid, group, user, system, children):
        fields = f"{pid} (a) b) R 1 {group} 1 0 -1 0 0 0 0 0 {user} {system} {children} 0 20 0"
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(fields)

    process(10, 10, 100, 50, 7)
    process(11, 10, 200, 0, 0)
    process(12, 12, 5000, 0, 0)
    (tmp_path / "13").mkdir()  # ended between listing and reading
    assert noise.group_cpu_s(10, tmp_path) == 357 / os.sysconf("SC_CLK_TCK")


def test_others_are_what_is_left_of_the_machine():
    with noise.watch_cpu() as cpu:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
    # What a process had of a processor, however many others wanted it.
    assert cpu.elapsed_s >= 0.19 and cpu.measured * cpu.elapsed_s == pytest.approx(0.2, rel=0.5)
    assert cpu.others is None or cpu.others >= 0.0
    with noise.watch_cpu() as cpu:
        pass
    assert cpu.others is None  # too short to tell
    assert noise.CpuUse(1.0, None, 0.5).others is None
    assert noise.CpuUse(1.0, 1.5, 0.5).others == 1.0


def test_the_probe_reads_memory_in_some_plausible_time():
    rate = noise.BandwidthProbe(threads=2, num_bytes=8 * 10**6, seconds=0.01).measure()
    assert 0.1 < rate < 10_000
