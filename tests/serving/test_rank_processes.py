"""Engines whose ranks are processes: their answers, their messages, and the end of any of them."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams, cli
from octavo.base.errors import ConfigError, EngineError
from octavo.core.host_kv_cache import AlwaysRestore
from octavo.core.request import Request
from octavo.kernels.cpu import library
from octavo.offload import restore_rule
from octavo.serving import rank_group
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs
from octavo.sim.agenda import Agenda
from octavo.sim.replica import Replica, ReplicaSpec
from octavo.sources.open import open_source
from octavo.system import numa

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone"),
]
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90))]
SETTINGS = {"threads": 2, "max_model_len": 128, "kernels": "native"}


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def followers_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["pgrep", "-P", str(pid), "-f", "rank_process"], capture_output=True, text=True
    )
    return [int(line) for line in listed.stdout.split()]


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.fixture(scope="module")
def alone(tiny_model):
    return answers(LLM(str(tiny_model), **SETTINGS))


def test_answers_are_those_of_one_rank_and_nothing_is_left(tiny_model, alone):
    with LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS) as llm:
        (follower,) = followers_of(os.getpid())
        assert answers(llm) == alone
    wait_until_gone(follower)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_answers_of_a_pipeline_are_those_of_one_rank_and_nothing_is_left(tiny_model, alone, tp, pp):
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with LLM(str(tiny_model), **layout, **{**SETTINGS, "threads": tp * pp}) as llm:
        followers = followers_of(os.getpid())
        assert len(followers) == tp * pp - 1
        assert answers(llm) == alone
        assert answers(llm) == alone
    for follower in followers:
        wait_until_gone(follower)


def test_the_end_of_a_follower_is_the_end_of_the_engine(tiny_model):
    with LLM(str(tiny_model), tensor_parallel_size=3, **{**SETTINGS, "threads": 3}) as llm:
        first, second = followers_of(os.getpid())
        answers(llm)
        os.kill(second, signal.SIGKILL)
        wait_until_gone(first)
        with pytest.raises(EngineError):
            answers(llm)
        with pytest.raises(EngineError):  # and it stays so
            answers(llm)


def test_a_follower_that_is_stopped_while_it_starts_ends_the_start(tiny_model, monkeypatch):
    support = Path(__file__).resolve().parent.parent / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(support), *filter(None, sys.path)]))
    monkeypatch.setattr(rank_group, "_FOLLOWER", "stopped_follower")
    with pytest.raises(ConfigError, match="rank 1 of 2 was ended, as it had done nothing for 1 s"):
        LLM(str(tiny_model), tensor_parallel_size=2, start_timeout=1.0, **SETTINGS)
    for pid in followers_of(os.getpid()):
        wait_until_gone(pid)


def test_a_layout_that_cannot_be_is_refused_before_anything_is_started(tiny_model, monkeypatch):
    monkeypatch.setattr("octavo.serving.rank_group.Followers", None)
    with pytest.raises(ConfigError, match="64 ranks .* the nearest is"):
        LLM(str(tiny_model), tensor_parallel_size=64, **SETTINGS)
    with pytest.raises(ConfigError, match="native CPU kernels"):
        LLM(str(tiny_model), tensor_parallel_size=2, kernels="reference")
    with pytest.raises(ConfigError, match="native CPU kernels"):
        LLM(str(tiny_model), pipeline_parallel_size=2, kernels="reference")
    with pytest.raises(ConfigError, match="3 stages .* the nearest is pipeline_parallel_size=2$"):
        LLM(str(tiny_model), pipeline_parallel_size=3, **{**SETTINGS, "threads": 4})
    with pytest.raises(ConfigError, match="nearest is tensor_parallel_size=2, pipeline_.*=2$"):
        LLM(
            str(tiny_model),
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
            **{**SETTINGS, "threads": 4},
        )
    with pytest.raises(ConfigError, match="method early_exit .* in a pipeline"):
        LLM(str(tiny_model), pipeline_parallel_size=2, spec_method="early_exit", **SETTINGS)


def test_ranks_that_find_no_memory_are_refused_before_one_is_started(tiny_model, monkeypatch):
    """A follower needs memory of its own; weights are in the memory of all."""
    weights = open_source(tiny_model).weights_bytes()
    free = weights + 2 * rank_group._PROCESS_BYTES
    monkeypatch.setattr(rank_group, "usable_memory_bytes", lambda: free)
    monkeypatch.setattr(rank_group, "Followers", None)
    settings = {**SETTINGS, "threads": 4}
    with pytest.raises(ConfigError, match="4 ranks need .* together.*; the nearest is 3"):
        LLM(str(tiny_model), tensor_parallel_size=4, **settings)


def test_a_follower_that_cannot_load_is_named(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setattr("octavo.serving.rank_group._FOLLOWER", "no_such_module")
    with pytest.raises(ConfigError, match="rank 1 of 2 ended .*(?s:.*)no_such_module"):
        LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS)
    assert followers_of(os.getpid()) == []


def test_two_nodes_have_a_rank_each_with_its_weights_and_kv(tiny_model, alone, monkeypatch):
    """By the calls that a rank makes: there is one node here."""
    cpus = sorted(os.sched_getaffinity(0))
    nodes = [
        numa.Node(0, tuple(cpus), 1 << 30, 1 << 30),
        numa.Node(1, (cpus[-1],), 1 << 30, 1 << 30),
    ]
    monkeypatch.setattr(numa, "nodes", lambda: tuple(nodes))
    calls: list[int] = []
    monkeypatch.setattr(numa, "_libc_syscall", lambda number, *_: calls.append(number) or 0)
    with LLM(str(tiny_model), tensor_parallel_size="auto", **SETTINGS) as llm:
        assert len(followers_of(os.getpid())) == 1
        assert answers(llm) == alone
    mbind, set_mempolicy = numa._NUMBERS[platform.machine()]
    assert calls == [set_mempolicy, mbind, mbind]  # of rank 0: its weights, its KV
    os.sched_setaffinity(0, cpus)


def test_one_node_is_one_rank(tiny_model, monkeypatch):
    monkeypatch.setattr(numa, "nodes", lambda: (numa.Node(0, (0, 1), 1 << 30, 1 << 30),))
    with LLM(str(tiny_model), tensor_parallel_size="auto", **SETTINGS):
        assert followers_of(os.getpid()) == []


# -- whole engines --------------------------------------------------------------------------------


def greedy(llm: LLM, num_tokens: int = 40) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(
        ["The capital of France is", "Once upon a time", "def add(a, b):"], params
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "fixture", ["smollm2_gguf", pytest.param("gemma3_gguf", marks=pytest.mark.long)]
)
def test_real_models(request, fixture):
    """Of 9 heads, of which ranks have 4 and 5, and of 4 heads of 256 values that share KV."""
    path, settings = request.getfixturevalue(fixture), {"threads": 2, "max_model_len": 256}
    with LLM(str(path), **settings) as llm:
        expected = greedy(llm)
    for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(str(path), **layout, **settings) as llm:
            assert greedy(llm) == expected


@pytest.mark.thinned(1)
@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts(tiny_model, alone, method, setting):
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(tiny_model)
    settings = {**SETTINGS, "speculative_config": config}
    with LLM(str(tiny_model), **{setting: 2}, **settings) as llm:
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in alone]


def test_an_engine_folder(tiny_model, tmp_path, alone):
    folder = tmp_path / "built"
    assert cli.main(["build", str(tiny_model), str(folder), "--num-blocks", "64"]) == 0
    with LLM(str(folder), **{**SETTINGS, "kernels": "auto"}) as llm:
        expected = answers(llm)
    for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(str(folder), **layout, **{**SETTINGS, "kernels": "auto"}) as llm:
            assert answers(llm) == expected


LAYOUTS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.fixture
def _always_reads(monkeypatch):
    """A model this small is sooner computed."""
    monkeypatch.setattr(restore_rule, "predicted_rule", lambda *_: AlwaysRestore())


def cached(model, tmp_path, **settings):
    """Answers to a prompt of 75 tokens, how many of them were in the folder, and its errors."""
    place = f"{tmp_path}:1MiB"
    with LLM(str(model), kv_offload=place, **{**SETTINGS, "threads": 4, **settings}) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": [*range(5, 80)]}], params)
        stats = llm._text_engine.engine.stats()
        logprobs = output.outputs[0].logprobs
        found = (output.outputs[0].token_ids, logprobs, stats.kv_store_errors)
        return found, stats.prefix_tokens_from_disk


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kv_of_all_ranks_is_found_again_in_a_folder(tiny_model, tmp_path, layout, _always_reads):
    expected, _ = cached(tiny_model, tmp_path / "of one")
    for from_folder in (0, 64):
        assert cached(tiny_model, tmp_path / "of all", **layout) == (expected, from_folder)
    assert followers_of(os.getpid()) == []


def test_another_layout_finds_nothing(tiny_model, tmp_path, _always_reads):
    found = [cached(tiny_model, tmp_path, **layout) for layout in ({}, *LAYOUTS)]
    assert found == [(found[0][0], 0)] * 4


def test_ranks_that_add_up_keep_no_kv_elsewhere(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="have KV in memory of their own"):
        cached(tiny_model, tmp_path, tensor_parallel_size=2, kernels="fused")
    assert followers_of(os.getpid()) == []


class Unheard:
    """A ``ReplicaListener`` for whom only steps count."""

    def received(self, request, token_ids, now) -> None: ...
    def ended(self, request, now) -> None: ...
    def refused(self, request, error) -> None:
        raise error


def test_a_live_pipeline_takes_the_steps_of_a_simulated_one(tiny_model):
    """Prompts in chunks, prefixes that are found, and more requests than run at once."""

    def requests() -> list[Request]:
        rng = random.Random(3)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in range(1, 31)]
        prompts = [
            [*range(20, 20 + rng.choice([0, 32])), *(rng.randrange(100, 250) for _ in range(n))]
            for n in (rng.randint(1, 60) for _ in params)
        ]
        return [Request(f"{i}", prompts[i], params[i], 0.0, seed=i) for i in range(len(params))]

    def shape_of(step) -> list[tuple[str, int, int]]:
        return [(i.request.request_id, i.start, i.num_tokens) for i in step.batch.items]

    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "num_blocks": 48}
    args = EngineArgs(str(tiny_model), pipeline_parallel_size=2, **sizes, **SETTINGS)
    loaded = load_engine(args)
    engine, live = loaded.text_engine.engine, []
    try:
        for request in requests():
            engine.add(request)
        while (step := engine.step()) is not None:
            live.append(shape_of(step))
    finally:
        engine.close()
    agenda, simulated = Agenda(), []
    replica = Replica(
        *("one", ReplicaSpec(loaded.config, lambda batch: 0.01, depth=2), agenda, Unheard()),
        watch=lambda times: simulated.append(shape_of(times.step)),
    )
    for request in requests():
        replica.add(request)
    replica.begin()
    agenda.run(replica.begin)
    assert live == simulated
    assert len(live) > 60


# -- the end of either process, at any exchange ---------------------------------------------------

ENGINE = """
import sys
from octavo import LLM, SamplingParams
tp, pp, ep = map(int, sys.argv[2:])
sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "threads": tp * pp}
llm = LLM(sys.argv[1], max_model_len=128, kernels="native", enable_expert_parallel=ep > 1, **sizes)
params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
print("ready", flush=True)
while sys.stdin.readline():
    prompts = [{"prompt_token_ids": list(range(first, 20))} for first in (3, 5)]
    llm.generate(prompts, params)
"""
# Of the memory of a group: the words that grow by a step at each meeting, and at each message
# (csrc/group.cpp).
PHASE_WORD, WRITTEN_WORD, GATE_STEP = 2 * 64 // 4, 3 * 64 // 4, 4
MEETINGS_OF_A_STEP = 20  # and some more, of two layers


@contextlib.contextmanager
def engine_of(
    model, tp: int, pp: int, ep: int = 1
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """An engine in a process of its own, and its followers; with ``ep`` above 1, experts are whole
    on ranks."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(model), str(tp), str(pp), str(ep)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            followers = followers_of(process.pid)
            assert len(followers) == tp * pp - 1
            yield process, followers
        finally:
            process.kill()


def wait_for_exchanges(pid: int, count: int) -> None:
    """Return as soon as the ranks of a process have met, or sent something, so often."""
    memories = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "octavo-group" in os.readlink(fd):
            words = np.memmap(fd, dtype=np.uint32, mode="r", shape=(WRITTEN_WORD + 1,))
            memories[fd.stat().st_ino] = words

    def exchanges() -> int:
        return sum(
            int(words[at]) for words in memories.values() for at in (PHASE_WORD, WRITTEN_WORD)
        )

    start, deadline = exchanges(), time.monotonic() + 60
    while exchanges() - start < count * GATE_STEP:
        assert time.monotonic() < deadline


def check_an_end_after(
    exchanges: int, model, who: int, signum: int, tp: int, pp: int, ep: int = 1
) -> None:
    """Check the end of all when rank ``who`` ends; 0 is the home rank."""
    with engine_of(model, tp, pp, ep) as (home, followers):
        home.stdin.write(1000 * "go\n")
        home.stdin.flush()
        wait_for_exchanges(home.pid, exchanges)
        os.kill([home.pid, *followers][who], signum)
        if signum == signal.SIGSTOP:  # which the server ends, when the engine hangs
            time.sleep(0.05)
            os.kill(home.pid, signal.SIGKILL)
        for follower in followers:
            wait_until_gone(follower, 2 + 8 * is_loaded())
        assert home.wait(2 + 8 * is_loaded()) != 0
        if who > 0 and signum == signal.SIGKILL:
            assert "PeerEndedError" in home.stderr.read()


def is_loaded() -> bool:
    return os.getloadavg()[0] > 1.5


# Ranks in each stage, stages, and which rank ends.
RANKS = [(tp, pp, who) for tp, pp in ((2, 1), (1, 2), (2, 2)) for who in range(tp * pp)]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
ENDS = [(*each, signum) for each in RANKS for signum in SIGNALS]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("exchanges", [1, 57])
@pytest.mark.parametrize("end", ENDS)
def test_an_end_at_an_exchange_is_the_end_of_all(tiny_model, end, exchanges):
    tp, pp, who, signum = end
    check_an_end_after(exchanges, tiny_model, who, signum, tp, pp)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp", "who", "signum"), ENDS)
def test_an_end_at_any_exchange_of_twenty_steps(tiny_model, tp, pp, who, signum):
    for exchanges in range(1, 20 * MEETINGS_OF_A_STEP, 4 if pp == 1 else 12):
        check_an_end_after(exchanges, tiny_model, who, signum, tp, pp)


# The same with whole experts on ranks, which meet once more in each layer that has some.
EXPERT_ENDS = [
    (tp, pp, who, signum)
    for tp, pp in ((2, 1), (2, 2))
    for who in range(tp * pp)
    for signum in SIGNALS
]


@pytest.mark.parametrize(("tp", "pp", "who", "signum"), [EXPERT_ENDS[2], EXPERT_ENDS[3]])
def test_an_end_at_an_exchange_of_whole_experts(tiny_hf, tp, pp, who, signum):
    for exchanges in (1, 57):
        check_an_end_after(exchanges, tiny_hf("mixtral"), who, signum, tp, pp, ep=tp)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp", "who", "signum"), EXPERT_ENDS)
def test_an_end_at_any_exchange_of_whole_experts(tiny_hf, tp, pp, who, signum):
    for exchanges in range(1, 20 * MEETINGS_OF_A_STEP, 4 if pp == 1 else 12):
        check_an_end_after(exchanges, tiny_hf("mixtral"), who, signum, tp, pp, ep=tp)


# -- ranks that add up their results, as GPUs do -------------------------------------------------

SUMS = {"device": "cpu", "kernels": "fused", "dtype": "float32", "max_model_len": 128}


def test_ranks_that_add_up_are_processes_too(tiny_model):
    canonical = {**SUMS, "batch_invariant": True}
    with LLM(str(tiny_model), **canonical) as llm:
        alone = answers(llm)
    with LLM(str(tiny_model), tensor_parallel_size=2, **canonical) as llm:
        (follower,) = followers_of(os.getpid())
        assert answers(llm) == alone
    wait_until_gone(follower)
    with LLM(str(tiny_model), tensor_parallel_size=2, **SUMS) as llm:
        for (tokens, logprob), (others, other) in zip(answers(llm), alone, strict=True):
            assert tokens == others
            assert logprob == pytest.approx(other, abs=1e-4)


def test_the_end_of_a_rank_that_others_add_up_with(tiny_model):
    with LLM(str(tiny_model), tensor_parallel_size=2, **SUMS) as llm:
        (follower,) = followers_of(os.getpid())
        answers(llm)
        os.kill(follower, signal.SIGKILL)
        wait_until_gone(follower)
        with pytest.raises(EngineError):
            answers(llm)


def test_a_rank_that_ends_while_others_wait_for_it_to_load(tiny_model, monkeypatch):
    monkeypatch.setattr("octavo.serving.rank_group._FOLLOWER", "no_such_module")
    with pytest.raises(ConfigError, match="rank 1 of 2 ended .*(?s:.*)no_such_module"):
        LLM(str(tiny_model), tensor_parallel_size=2, **SUMS)
    assert followers_of(os.getpid()) == []


def test_canonical_sums_are_refused_for_ranks_that_are_no_power_of_two(tiny_model):
    canonical = {**SUMS, "batch_invariant": True, "threads": 3}
    with pytest.raises(ConfigError, match="8 slices, which 3 ranks .* the nearest is 2"):
        LLM(str(tiny_model), tensor_parallel_size=3, **canonical)
