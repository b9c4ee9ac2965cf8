"""A server whose engine has a stage on another machine, which may end at any time, and the engine
with it. The other machine is a command of this one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

BODY = {
    "stream": True,
    "prompt": "The capital of France is",
    "max_tokens": 150,
    "seed": 5,
    "temperature": 0.8,
    "ignore_eos": True,
    "return_token_ids": True,
}
FLAGS = ("--pipeline-parallel-size", "2", "--stage-command", sys.executable)
FLAGS = (*FLAGS, "--threads", "1", "--max-model-len", "256")
SECONDS = 60.0  # of which none is waited for where all is well


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = (*FLAGS, "--resume-streams", "--engine-timeout", "6")
    with live_server(tiny_model, *flags) as server:
        yield server


def remote_ranks(server) -> list[int]:
    return server.processes_of("octavo.runtime.remote_rank")


def ids_of(stream) -> list[int]:
    assert not stream.errors and stream.is_whole, stream.events[-1:]
    return [token for choice in stream.choices for token in choice.get("token_ids") or []]


def gone(pid: int) -> None:
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


async def signalled(server, signum) -> list[int]:
    """The tokens of an answer in the middle of which the other machine's rank got a signal."""
    stream = await server.stream(BODY)
    for _ in range(3):
        await stream.next()
    (remote,) = remote_ranks(server)
    os.kill(remote, signum)
    return ids_of(await stream.rest())


def wait_until_restarted(server, before: int) -> None:
    """Wait for the restart of the engine: the last tokens may come from the one that ends."""
    deadline = time.monotonic() + SECONDS
    while server.load()["num_restarts"] == before or server.fetch("/health").status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_the_end_of_a_stage(server, signum):
    expected = ids_of(server.run(server.complete(BODY)))
    before, (remote,) = server.load()["num_restarts"], remote_ranks(server)
    assert server.run(signalled(server, signum)) == expected
    gone(remote)
    wait_until_restarted(server, before)
    assert server.load()["num_restarts"] == before + 1
    assert len(remote_ranks(server)) == 1


def test_an_idle_engine_notices_the_end_of_a_stage(server):
    before, (remote,) = server.load()["num_restarts"], remote_ranks(server)
    os.kill(remote, signal.SIGKILL)
    wait_until_restarted(server, before)
    assert any("rank 1 of 2 on" in line and "was cut" in line for line in server.log)
    assert ids_of(server.run(server.complete(BODY)))


def test_stages_end_with_the_server_and_with_its_engine(live_server, tiny_model):
    with live_server(tiny_model, *FLAGS) as server:
        (remote,) = remote_ranks(server)
        os.kill(server.pid, signal.SIGKILL)
        gone(remote)
