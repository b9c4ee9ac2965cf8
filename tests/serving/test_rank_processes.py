"""Engines whose ranks are processes: their answers, their messages, and the end of any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, EngineError, PeerEndedError
from octavo.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone"),
]
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90))]
SETTINGS = {"threads": 1, "max_model_len": 128, "kernels": "native"}


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
    llm = LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS)
    (follower,) = followers_of(os.getpid())
    assert answers(llm) == alone
    llm.shutdown()
    wait_until_gone(follower)


def test_the_end_of_a_follower_is_the_end_of_the_engine(tiny_model):
    llm = LLM(str(tiny_model), tensor_parallel_size=3, **SETTINGS)
    first, second = followers_of(os.getpid())
    answers(llm)
    os.kill(second, signal.SIGKILL)
    wait_until_gone(first)
    with pytest.raises(EngineError):
        answers(llm)
    with pytest.raises(EngineError):  # and it stays so
        answers(llm)


def test_a_follower_that_cannot_load_is_named(tiny_model, monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS", "none")
    with pytest.raises(ConfigError, match="heads|ranks|rank"):
        LLM(str(tiny_model), tensor_parallel_size=64, **SETTINGS)
    assert followers_of(os.getpid()) == []
