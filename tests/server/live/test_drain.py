"""How a server stops: it finishes what it has begun, or, in a hurry, says that it will not."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from typing import Any

import pytest
from pace import python_seconds

SLOW = 200  # a prompt with this token makes each step take 0.2 s longer
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
ENDLESS = {**GREEDY, "prompt": [SLOW], "max_tokens": 250, "stream": True}


def short(number: int, **fields: Any) -> dict[str, Any]:
    return {**GREEDY, "prompt": [SLOW, number], "max_tokens": 6, **fields}


@pytest.mark.timing
def test_what_runs_or_waits_may_finish(live_server, tiny_model):
    flags = ("--max-num-seqs", "4", "--drain-timeout", "30")
    with live_server(tiny_model, *flags, faults={"slow": SLOW}) as server:
        streams, whole, refused = server.run(_drain_under_load(server))
        assert server.wait(30 + 2) == 0
        assert server.descendants() == []
    assert refused.status == 503 and refused.is_whole
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    assert refused.error["type"] == "overloaded_error"
    for stream in streams:
        assert stream.finish_reasons == ["length"] and stream.errors == []
        assert len(stream.token_ids) == 6 and stream.num_done == 1 and stream.is_whole
    for answer in whole:
        assert answer.status == 200 and answer.is_whole
        assert len(answer.json()["choices"][0]["token_ids"]) == 6


async def _drain_under_load(server) -> tuple[list[Any], list[Any], Any]:
    """Streams and whole answers that were under way, and the answer to a client that comes late."""
    streams = [asyncio.create_task(server.complete(short(n, stream=True))) for n in range(5)]
    whole = [asyncio.create_task(server.ask("/v1/completions", short(n))) for n in range(5, 8)]
    async with asyncio.timeout(30):
        while (await server.ask("/load")).json()["num_waiting"] < 4:
            await asyncio.sleep(0.01)
    usual = (await server.ask("/ready")).seconds
    server.signal(signal.SIGTERM)
    signalled = time.perf_counter()
    while (await server.ask("/ready")).status == 200:
        await asyncio.sleep(0.005)
    seconds = time.perf_counter() - signalled
    print(f"/ready said 503 after {seconds * 1e3:.0f} ms")
    assert seconds < 5 * usual + python_seconds(6e6, time.perf_counter)
    assert (await server.ask("/health")).status == 200  # it lives
    refused = await server.ask("/v1/completions", short(9))
    return await asyncio.gather(*streams), await asyncio.gather(*whole), refused


@pytest.mark.parametrize(
    ("drain_timeout", "num_signals", "least"),
    [(60, 2, 0), (0, 1, 0), (1, 1, 1)],
    ids=["second signal", "no time to drain", "time is over"],
)
def test_each_stream_is_told_when_it_cannot_finish(
    live_server, tiny_model, drain_timeout, num_signals, least
):
    flags = ("--drain-timeout", str(drain_timeout), "--max-num-seqs", "4")
    with live_server(tiny_model, *flags, faults={"slow": SLOW}) as server:
        streams, queued = server.run(_stop_under_load(server, num_signals))
        assert server.wait(10) == 0
        seconds = time.monotonic() - server.stopped
    print(f"stopped in {seconds:.2f} s")
    assert least <= seconds
    for stream in streams:
        assert stream.token_ids and stream.finish_reasons == []
        assert len(stream.errors) == 1 and "error" in stream.events[-1]
        assert stream.errors[0]["type"] == "overloaded_error"
        assert stream.num_done == 1 and stream.is_whole
    assert queued.status == 503 and "retry-after" in queued.headers


async def _stop_under_load(server, num_signals: int) -> tuple[list[Any], Any]:
    """Streams that were running, and the answer to a request that was in the queue."""
    streams = await asyncio.gather(*(server.stream(ENDLESS) for _ in range(4)))
    for stream in streams:
        await stream.next()
    queued = asyncio.create_task(server.ask("/v1/completions", short(1)))
    async with asyncio.timeout(30):
        while (await server.ask("/load")).json()["num_waiting"] < 1:
            await asyncio.sleep(0.01)
    for _ in range(num_signals):
        server.signal(signal.SIGTERM)
        server.stopped = time.monotonic()
        with contextlib.suppress(OSError):  # until it has seen the signal, or has gone
            while (await server.ask("/ready")).status == 200:
                await asyncio.sleep(0.005)
    return list(await asyncio.gather(*(stream.rest() for stream in streams))), await queued


@pytest.mark.timing  # a tiny model has loaded after half a second
def test_a_signal_while_it_loads(live_server, tiny_model):
    with live_server(tiny_model, waits=False) as server:
        deadline = time.monotonic() + 60
        while not server.engine_pids():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 0
        assert server.descendants() == []
    assert not [line for line in server.log if "Traceback" in line or "ready" in line]


@pytest.mark.thinned(1, most=2)
@pytest.mark.parametrize("damage", ["missing", "config", "weights"])
def test_a_bad_model_is_one_line_and_status_1(live_server, tiny_model, tmp_path, damage):
    model = tmp_path / "bad-model"
    if damage != "missing":
        shutil.copytree(tiny_model, model)
    if damage == "config":
        (model / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    if damage == "weights":
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with live_server(model, waits=False) as server:
        assert server.wait(30) == 1
        assert server.descendants() == []
    assert len(server.log) == 1 and str(model) in server.log[0], server.log
