"""Two replicas in processes of their own, behind one server."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from live_server import Counters
from streamed_answers import BODIES, content_of, until_states

KILL = 202  # a token of prompts that end their engine


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = ("--data-parallel-size", "2", "--resume-streams", "--router", "least_loaded")
    with live_server(tiny_model, *flags, faults={"kill": KILL}) as server:
        yield server


async def restarted(server, before: float) -> None:
    while (await server.ask("/load")).json()["num_restarts"] == before:
        await asyncio.sleep(0.005)


async def _kill_under_streams(server, bodies=BODIES):
    before = (await server.ask("/load")).json()["num_restarts"]
    streams = [await server.stream(body) for body in bodies]
    for stream in streams:
        for _ in range(3):
            await stream.next()
    os.kill(server.engine_pids()[0], signal.SIGKILL)
    killed = time.monotonic()

    async def back():
        await restarted(server, before)
        health = await server.ask("/health")
        await until_states(server, ["ready", "ready"])
        return health.status, time.monotonic() - killed

    reading = [asyncio.create_task(stream.rest()) for stream in streams]
    status, seconds = await back()
    return await asyncio.gather(*reading), status, seconds


def test_streams_go_on_after_a_kill_and_stay_the_same(server):
    expected = [content_of(server.run(server.complete(body))) for body in BODIES]
    streams, status, seconds = server.run(_kill_under_streams(server))
    print(f"back {seconds:.2f} s after the kill; the server had started in "
          f"{server.start_seconds:.2f} s")  # fmt: skip
    assert status == 200  # the other replica serves
    assert [content_of(stream) for stream in streams] == expected
    assert server.counter("engine_restarts_total") == 1


def test_a_poisonous_request_ends_two_engines_and_no_stream(server):
    before = server.load()["num_restarts"]

    async def main():
        streams = [await server.stream(body) for body in BODIES]
        answer = await server.ask("/v1/completions", {"prompt": [KILL, 1], "max_tokens": 4})
        again = await server.ask("/v1/completions", {"prompt": [KILL, 1], "max_tokens": 4})
        read = [await stream.rest() for stream in streams]
        await until_states(server, ["ready", "ready"])
        return answer, again, read

    answer, again, streams = server.run(main())
    assert answer.status == again.status == 500, (answer.body, again.body)
    for stream in streams:
        content_of(stream)
    assert server.load()["num_restarts"] == before + 2


def test_metrics_tell_replicas_apart(server):
    for _ in range(4):
        server.fetch("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    counters = server.counters()
    for number in ("0", "1"):
        assert counters.sum("routed_requests_total", replica=number) > 0
        assert counters.sum("engine_state", replica=number, state="ready") == 1
        assert counters.sum("iteration_tokens_count", replica=number, engine=number) > 0
    assert counters.sum("generation_tokens_total") > 0
    assert counters.sum("num_requests_unplaced") == 0
    own = [sample for sample in counters.samples if sample.name == "octavo_generation_tokens_total"]
    assert all("replica" not in sample.labels for sample in own)
    vllm = server.fetch("/metrics?names=vllm").body.decode()
    assert 'vllm:num_requests_running{engine="1",model_name=' in vllm


def test_the_stream_of_steps_names_replicas(server):
    async def main():
        async with asyncio.timeout(60):
            reader, writer = await server.open()
            writer.write(server.request("/steps?snapshots=true"))
            await server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 20, "n": 2})
            await server.ask("/v1/completions", {"prompt": "abd", "max_tokens": 20, "n": 2})
            text = b""
            while b'"replicas"' not in text or b'"steps"' not in text:
                text += await reader.read(1 << 16)
            return text.decode()

    text = server.run(main())
    assert '"engine": "ready"' in text or '"engine":"ready"' in text
    assert '"replica":0' in text.replace(" ", "") and '"replica":1' in text.replace(" ", "")


def test_an_operator_adds_drains_and_removes(server):
    def post(**body):
        return server.fetch("/octavo/replicas", body)

    assert post(action="drain", replica=7).status == 404
    assert post(action="drain").status == 400
    assert post(action="add", replica=1).status == 400
    assert post(action="grow").status == 400
    assert post(action="drain", replica=0).status == 202
    server.run(until_states(server, ["ready"]))
    deadline = time.monotonic() + 30
    while len(server.engine_pids()) > 1:  # it ends after it has left the list
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer = post(action="remove", replica=1)
    assert answer.status == 409 and "last" in answer.error["message"]
    assert post(action="add").json()["replicas"][-1]["replica"] == 2
    server.run(until_states(server, ["ready", "ready"]))
    assert post(action="remove", replica=1).status == 202
    server.run(until_states(server, ["ready"]))
    assert server.fetch("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status == 200
    counters: Counters = server.counters()
    assert {s.labels["replica"] for s in counters.samples if "replica" in s.labels} == {"2"}
    assert server.fetch("/octavo/replicas").json()["replicas"][0]["replica"] == 2


def test_one_engine_has_no_replicas(live_server, tiny_model):
    with live_server(tiny_model, "--resume-streams") as server:
        assert server.fetch("/octavo/replicas").status == 404
        expected = [content_of(server.run(server.complete(body))) for body in BODIES]

        async def main():
            streams = [await server.stream(body) for body in BODIES]
            for stream in streams:
                for _ in range(3):
                    await stream.next()
            os.kill(server.engine_pid, signal.SIGKILL)
            return [await stream.rest() for stream in streams]

        assert [content_of(stream) for stream in server.run(main())] == expected
        assert server.counter("engine_restarts_total") == 1
        samples = server.counters().samples
        assert all("replica" not in sample.labels for sample in samples)
        assert all(sample.labels.get("engine", "0") == "0" for sample in samples)


@pytest.mark.long
def test_a_real_model_goes_on_as_well(live_server, smollm2_gguf):
    """Two replicas of SmolLM2, of which one is killed under a greedy and a drawn stream each."""
    bodies = [
        {
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 60,
            "prompt": prompt,
            **more,
        }
        for prompt in ("The capital of France is", "Once upon a time")
        for more in ({"temperature": 0, "logprobs": 1}, {"seed": 3})
    ]
    flags = ("--data-parallel-size", "2", "--resume-streams", "--max-model-len", "512")
    with live_server(smollm2_gguf, *flags) as server:
        assert any("2 replicas share" in line for line in server.log)
        expected = [content_of(server.run(server.complete(body))) for body in bodies]
        assert "Paris" in expected[0][0][0]
        streams, status, seconds = server.run(_kill_under_streams(server, bodies))
        print(f"back {seconds:.2f} s after the kill; the server had started in "
              f"{server.start_seconds:.2f} s")  # fmt: skip
        assert status == 200
        assert [content_of(stream) for stream in streams] == expected
