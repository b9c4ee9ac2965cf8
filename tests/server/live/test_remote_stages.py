"""A server whose engine has a stage on another machine, which may end at any time, and the engine
with it. The other machine is a command of this one."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from live_ranks import BODY, gone, ids_of, signalled, signalled_process, wait_until_restarted
from live_server import descendants

pytest.importorskip("cryptography", reason="connections between machines need certificates")

PROCESS = "octavo.runtime.remote_rank"
FLAGS = ("--pipeline-parallel-size", "2", "--stage-command", sys.executable)
FLAGS = (*FLAGS, "--threads", "1", "--max-model-len", "256")
SECONDS = 60.0  # of which none is waited for where all is well


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = (*FLAGS, "--resume-streams", "--engine-timeout", "6")
    with live_server(tiny_model, *flags) as server:
        yield server


def remote_ranks(server) -> list[int]:
    return server.processes_of(PROCESS)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_the_end_of_a_stage(server, signum):
    expected = ids_of(server.run(server.complete(BODY)))
    before, (remote,) = server.load()["num_restarts"], remote_ranks(server)
    assert server.run(signalled(server, PROCESS, signum)) == expected
    gone(remote, SECONDS)
    wait_until_restarted(server, before)
    assert server.load()["num_restarts"] == before + 1
    assert len(remote_ranks(server)) == 1


@pytest.fixture(scope="module")
def server_of_two_ranks(live_server, tiny_model):
    """Two ranks in each of two stages."""
    flags = (*FLAGS, "--tensor-parallel-size", "2", "--resume-streams", "--engine-timeout", "6")
    with live_server(tiny_model, *flags) as server:
        yield server


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_the_end_of_another_rank_of_a_stage(server_of_two_ranks, signum):
    server = server_of_two_ranks
    expected = ids_of(server.run(server.complete(BODY)))
    before, (remote,) = server.load()["num_restarts"], remote_ranks(server)
    others = server.processes_of("octavo.runtime.rank_process")
    (beside,) = [pid for pid in others if pid in descendants(remote)]
    assert len(others) == 2
    assert server.run(signalled_process(server, beside, signum)) == expected
    for pid in (remote, *others):
        gone(pid, SECONDS)
    wait_until_restarted(server, before)
    assert server.load()["num_restarts"] == before + 1
    assert len(server.processes_of("octavo.runtime.rank_process")) == 2


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
        gone(remote, SECONDS)
