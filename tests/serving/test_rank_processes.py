"""Engines whose ranks are processes: their answers, their messages, and the end of any of them."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams, cli
from octavo.base.errors import ConfigError, EngineError
from octavo.kernels.cpu import library
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


def test_a_layout_that_cannot_be_is_refused_before_anything_is_started(tiny_model, monkeypatch):
    monkeypatch.setattr("octavo.serving.rank_group.Followers", None)
    with pytest.raises(ConfigError, match="64 ranks .* the nearest is"):
        LLM(str(tiny_model), tensor_parallel_size=64, **SETTINGS)
    with pytest.raises(ConfigError, match="native CPU kernels"):
        LLM(str(tiny_model), tensor_parallel_size=2, kernels="reference")


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


def test_real_models(smollm2_gguf, gemma3_gguf):
    """Of 9 heads, of which ranks have 4 and 5, and of 4 heads of 256 values that share KV."""
    for path in (smollm2_gguf, gemma3_gguf):
        settings = {"threads": 2, "max_model_len": 256}
        with LLM(str(path), **settings) as llm:
            expected = greedy(llm)
        with LLM(str(path), tensor_parallel_size=2, **settings) as llm:
            assert greedy(llm) == expected


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts(tiny_model, alone, method):
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(tiny_model)
    settings = {**SETTINGS, "speculative_config": config}
    with LLM(str(tiny_model), tensor_parallel_size=2, **settings) as llm:
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in alone]


def test_an_engine_folder(tiny_model, tmp_path, alone):
    folder = tmp_path / "built"
    assert cli.main(["build", str(tiny_model), str(folder), "--num-blocks", "64"]) == 0
    with LLM(str(folder), **{**SETTINGS, "kernels": "auto"}) as llm:
        expected = answers(llm)
    with LLM(str(folder), tensor_parallel_size=2, **{**SETTINGS, "kernels": "auto"}) as llm:
        assert answers(llm) == expected


def test_kv_in_a_folder_is_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="one of 2 ranks"):
        LLM(
            str(tiny_model),
            tensor_parallel_size=2,
            kv_offload=f"{tmp_path}:64MiB",
            **SETTINGS,
        )
    assert followers_of(os.getpid()) == []
