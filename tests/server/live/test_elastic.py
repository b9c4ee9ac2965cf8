"""A server whose replicas come and go: real processes, and a load that rises and falls."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

BODY = {
    "max_tokens": 120,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = ("--data-parallel-size", "1..2", "--max-num-seqs", "2", "--threads", "1")
    times = ("--target-ttft", "1ms", "--scale-down-after", "1")
    with live_server(tiny_model, *flags, *times) as server:
        yield server


async def states(server) -> list[str]:
    answer = await server.ask("/octavo/replicas")
    return [each["state"] for each in answer.json()["replicas"]]


async def counted(server, name: str, **labels: str) -> int:
    text = (await server.ask("/metrics")).body.decode()
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return int(sum(sample.value for sample in samples))


async def scalings(server) -> tuple[int, int]:
    name = "octavo:replica_scalings_total"
    up = await counted(server, name, direction="up")
    return up, await counted(server, name, direction="down")


async def num_routed(server, replica: int) -> int:
    return await counted(server, "octavo:routed_requests_total", replica=str(replica))


def test_a_rising_load_gets_a_second_replica_and_no_request_is_lost(server):
    """Clients come, each with one request after another, until there are two replicas; then they
    leave, and one replica is drained."""
    answers = []

    async def client(number, may_leave):
        while not may_leave.is_set():
            body = {**BODY, "prompt": f"client {number}"}
            stream = await (await server.stream(body)).rest()
            assert stream.status == 200 and stream.is_whole and not stream.errors
            answers.append((number, stream.token_ids))

    async def main():
        assert await states(server) == ["ready"]
        assert await scalings(server) == (0, 0)
        may_leave, clients = asyncio.Event(), []
        for number in range(12):
            clients.append(asyncio.create_task(client(number, may_leave)))
            await asyncio.sleep(0.05)
        while await states(server) != ["ready", "ready"]:
            await asyncio.sleep(0.05)
        while len({number for number, _ in answers}) < 12:
            await asyncio.sleep(0.05)
        while await num_routed(server, 1) == 0:
            await asyncio.sleep(0.05)
        may_leave.set()
        await asyncio.gather(*clients)
        while await states(server) != ["ready"]:
            await asyncio.sleep(0.05)
        assert await scalings(server) == (1, 1)

    asyncio.run(asyncio.wait_for(main(), 120))
    for number in range(12):
        mine = [ids for other, ids in answers if other == number]
        assert all(ids == mine[0] and len(ids) == 120 for ids in mine)
