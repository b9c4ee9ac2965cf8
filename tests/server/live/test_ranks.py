"""A server whose engines have two ranks each, of which any may end at any time."""

from __future__ import annotations

import os
import signal
import time

import pytest
from live_ranks import BODY, gone, ids_of, signalled, wait_until_restarted

PROCESS = "octavo.runtime.rank_process"
FLAGS = ("--tensor-parallel-size", "2", "--threads", "2", "--max-model-len", "256")


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = (*FLAGS, "--resume-streams", "--engine-timeout", "6")
    with live_server(tiny_model, *flags) as server:
        yield server


def followers_of(server) -> list[int]:
    return server.processes_of(PROCESS)


def test_answers_are_those_of_one_rank(server, live_server, tiny_model):
    assert server.fetch("/v1/models").status == 200
    with live_server(tiny_model, "--max-model-len", "256") as alone:
        expected = ids_of(alone.run(alone.complete(BODY)))
    assert ids_of(server.run(server.complete(BODY))) == expected


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_the_end_of_a_follower(server, signum):
    """One that stops is ended with its engine, once that has hung for as long as it may."""
    expected = ids_of(server.run(server.complete(BODY)))
    before, (follower,) = server.load()["num_restarts"], followers_of(server)
    assert server.run(signalled(server, PROCESS, signum)) == expected
    gone(follower)
    wait_until_restarted(server, before)
    assert server.load()["num_restarts"] == before + 1
    assert len(followers_of(server)) == 1


def test_an_idle_engine_notices_the_end_of_a_follower(server):
    before, (follower,) = server.load()["num_restarts"], followers_of(server)
    os.kill(follower, signal.SIGKILL)
    wait_until_restarted(server, before)
    assert any("rank 1 of 2 ended with signal 9" in line for line in server.log)
    assert ids_of(server.run(server.complete(BODY)))


def test_followers_end_with_the_server(live_server, tiny_model):
    with live_server(tiny_model, *FLAGS) as server:
        (follower,) = followers_of(server)
        os.kill(server.pid, signal.SIGKILL)
        gone(follower)


def test_replicas_of_two_ranks_each(live_server, tiny_model):
    """The end of one rank is the end of its replica's engine, and of no other's stream."""
    flags = (*FLAGS, "--data-parallel-size", "2", "--router", "round_robin")
    with live_server(tiny_model, *flags) as server:
        body = {**BODY, "max_tokens": 220}
        expected = ids_of(server.run(server.complete(body)))

        async def until_killed(victim):
            streams = [await server.stream(body) for _ in range(2)]
            for stream in streams:
                for _ in range(3):
                    await stream.next()
            os.kill(victim, signal.SIGKILL)
            return [await stream.rest() for stream in streams]

        for _ in range(5):  # a busy machine may have made a whole answer before its rank ends
            streams = server.run(until_killed(wait_for_two_followers(server)[0]))
            if any(stream.errors for stream in streams):
                break
        (failed,) = (stream for stream in streams if stream.errors)
        (whole,) = (stream for stream in streams if stream is not failed)
        assert ids_of(whole) == expected
        wait_for_two_followers(server)


def wait_for_two_followers(server) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := followers_of(server)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
