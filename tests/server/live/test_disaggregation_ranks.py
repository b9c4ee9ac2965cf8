"""Prompts that are computed by one replica and answered by another, of several ranks each."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from slow_computing import slow_computing
from streamed_answers import BODIES, content_of, until_states

ROLES = ("--data-parallel-size", "2", "--prefill-replicas", "1", "--max-local-prefill-length", "20")
FLAGS = (*ROLES, "--threads", "4", "--resume-streams", "--max-model-len", "256")
FOLLOWER = "octavo.runtime.rank_process"
LAYOUTS = {
    "tp": ("--tensor-parallel-size", "2"),
    "pp": ("--pipeline-parallel-size", "2"),
    "both": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
}
PROMPTS = [[number, *range(30, 200)] for number in range(3, 9)]


def bodies():
    return [
        {**BODIES[number % len(BODIES)], "prompt": prompt, "max_tokens": 20, "min_tokens": 0}
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", autouse=True)
def slow_machine(tmp_path_factory):
    with slow_computing(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def alone(live_server, tiny_model):
    """Answers of one engine of one rank."""
    with live_server(tiny_model, "--max-model-len", "256") as server:
        return server.run(streamed(server))


async def streamed(server):
    streams = [await server.stream(body) for body in bodies()]
    return [content_of(await stream.rest()) for stream in streams]


def transferred(server) -> float:
    return server.counter("prefix_cache_restored_tokens_total", place="peers")


@pytest.mark.parametrize("layout", ["tp", "pp", pytest.param("both", marks=pytest.mark.long)])
def test_answers_are_those_of_one_rank(live_server, tiny_model, alone, layout):
    with live_server(tiny_model, *FLAGS, *LAYOUTS[layout]) as server:
        for _ in range(2):  # and once more, from caches
            assert server.run(streamed(server)) == alone
        # Ten blocks of each prompt are whole; some requests have several samples.
        assert transferred(server) >= len(PROMPTS) * 160
        assert server.counter("kv_blocks", state="used") == 0
        assert server.counter("invariant_violations_total") == 0


def test_a_follower_that_is_killed_ends_its_replica_alone(live_server, tiny_model, alone):
    with live_server(tiny_model, *FLAGS, *LAYOUTS["tp"]) as server:

        async def main():
            await until_states(server, ["ready"] * 2)
            for follower in server.processes_of(FOLLOWER):
                work = asyncio.create_task(streamed(server))
                await asyncio.sleep(0.05)
                os.kill(follower, signal.SIGKILL)
                assert await work == alone
                await until_states(server, ["ready"] * 2)
            return await streamed(server)

        assert server.run(main()) == alone
        assert server.load()["num_restarts"] == 2
        assert len(server.processes_of(FOLLOWER)) == 2
