"""Clients that leave at any moment: nothing of their requests stays, no other client notices."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import struct
import time

import pytest
from pace import python_seconds

pytestmark = pytest.mark.xdist_group("a live server")

SLOW = 200  # a prompt with this token makes each step take 0.2 s longer
NUM_CONNECTIONS = 1000
AT_ONCE = 40

HEALTHY = {
    "prompt": "the quick brown fox",
    "max_tokens": 64,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def server(shared_server, tiny_model):
    return shared_server(tiny_model)


@pytest.fixture(scope="module")
def slow_server(live_server, tiny_model):
    flags = ("--slow-reader-timeout", "1", "--num-blocks", "4096")
    with live_server(tiny_model, *flags, faults={"slow": SLOW}) as server:
        yield server


# -- cut at any byte ---------------------------------------------------------------------------


def test_a_thousand_cut_connections_leave_nothing(server):
    (expected,) = server.run(_healthy_tokens(server, 1))
    before = server.counters()
    files, memory = server.num_files(), server.resident_bytes()

    tokens = server.run(_cut_many(server, random.Random(4)))

    load = server.wait_until_idle()
    assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)
    assert load["num_restarts"] == 0
    assert load["num_free_blocks"] + load["num_cached_blocks"] == 1024
    assert len(tokens) >= 4 and all(each == expected for each in tokens)
    after = server.counters()
    assert after.sum("num_requests_running") == after.sum("num_requests_waiting") == 0
    assert after.sum("kv_blocks", state="used") == 0
    submitted = after.sum("requests_submitted_total") - before.sum("requests_submitted_total")
    ended = after.sum("request_success_total") - before.sum("request_success_total")
    aborted = after.sum("request_success_total", finished_reason="abort")
    assert submitted == ended
    assert aborted > 100  # else the connections were cut too late to show anything
    assert after.sum("request_success_total", finished_reason="error") == 0
    assert _settled(server.num_files, files) <= files + 2
    assert server.resident_bytes() - memory < 64 << 20
    assert not [line for line in server.log if "Traceback" in line or "damaged" in line]


async def _cut_many(server, rng: random.Random) -> list[list[int]]:
    """Cut connections, while some clients stay; what these got."""
    cuts = [_random_cut(rng) for _ in range(NUM_CONNECTIONS)]
    tokens: list[list[int]] = []

    async def cut_some(number: int) -> None:
        for cut in cuts[number::AT_ONCE]:
            await _cut(server, *cut)

    async def stay() -> None:
        while not cutting.done():
            tokens.extend(await _healthy_tokens(server, 2))

    cutting = asyncio.gather(*(cut_some(number) for number in range(AT_ONCE)))
    await asyncio.gather(cutting, stay())
    return tokens


def _random_cut(rng: random.Random) -> tuple[dict, float, int | None, float, bool]:
    """A body; the share of the request that is sent; bytes of the answer to wait for, or seconds;
    and whether the connection is reset."""
    body = {
        "prompt": "".join(chr(rng.randrange(97, 123)) for _ in range(rng.randrange(1, 60))),
        "max_tokens": rng.choice((2, 50, 150)),
        "ignore_eos": True,
        "n": rng.choice((1, 1, 3)),
        "stream": rng.random() < 0.6,
    }
    kind = rng.random()
    share = rng.random() if kind < 0.25 else 1.0
    num_bytes = rng.randrange(1, 8000) if body["stream"] and kind > 0.6 else None
    return body, share, num_bytes, rng.random() * 0.05, rng.random() < 0.5


async def _cut(
    server, body: dict, share: float, num_bytes: int | None, seconds: float, resets: bool
) -> None:
    reader, writer = await server.open()
    request = server.request("/v1/completions", body)
    writer.write(request[: int(share * len(request))])
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        if num_bytes is None:
            await asyncio.sleep(seconds)
        else:
            await reader.readexactly(num_bytes)
    if resets:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _healthy_tokens(server, count: int) -> list[list[int]]:
    streams = await asyncio.gather(*(server.complete(HEALTHY) for _ in range(count)))
    assert all(stream.finish_reasons == ["length"] and stream.is_whole for stream in streams)
    return [stream.token_ids for stream in streams]


def _settled(measure, wanted: int) -> int:
    """What is measured, when it has come down to what is wanted, or a moment later."""
    deadline = time.monotonic() + 5
    while (value := measure()) > wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


# -- how soon ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_the_blocks_are_free_after_the_next_step(slow_server, streams):
    three_steps = {"prompt": [SLOW] * 20, "max_tokens": 3, "ignore_eos": True}
    most = slow_server.fetch("/v1/completions", three_steps).seconds
    delays = sorted(slow_server.run(_time_to_free(slow_server, streams)) for _ in range(7))
    print("seconds to free the blocks:", delays)
    # A step that has begun is not interrupted; and on a busy machine some wait for their turn.
    assert delays[3] < most, delays


async def _time_to_free(server, streams: bool) -> float:
    """Seconds from the end of a connection until its blocks are in the pool again."""
    body = {"prompt": [SLOW] * 20, "max_tokens": 100, "ignore_eos": True, "stream": streams}
    reader, writer = await server.open()
    writer.write(server.request("/v1/completions", body))
    while not await _num_used_blocks(server):
        await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    cut = time.perf_counter()
    deadline = cut + 10
    while await _num_used_blocks(server):
        await asyncio.sleep(0.005)
        assert time.perf_counter() < deadline, "they are not freed"
    return time.perf_counter() - cut


async def _num_used_blocks(server) -> int:
    return (await server.ask("/load")).json()["num_used_blocks"]


# -- readers that do not read ------------------------------------------------------------------


@pytest.mark.timing
def test_slow_readers_are_cut_and_slow_nobody_else(slow_server):
    server, num_slow = slow_server, 24
    memory = server.resident_bytes()
    cut_before = server.counter("slow_readers_cut_total")
    alone = server.run(_gap(server))
    sockets = [_unread_stream(server) for _ in range(num_slow)]
    try:
        server.wait_until_idle()  # what they do not read has been made, or given up
        beside = server.run(_gap(server))
        deadline = time.monotonic() + 10
        while server.counter("slow_readers_cut_total") - cut_before < num_slow:
            assert time.monotonic() < deadline, "they were not cut"
            time.sleep(0.05)
        load = server.wait_until_idle()
        assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)
        grown = server.resident_bytes() - memory
        assert grown < 64 << 20
    finally:
        for one in sockets:
            one.close()
    print(f"ITL {alone * 1e3:.2f} ms alone, {beside * 1e3:.2f} ms beside; {grown} bytes more")
    assert beside < 2 * alone + python_seconds(1e5, time.perf_counter)


def _unread_stream(server) -> socket.socket:
    """A connection whose answer, half a megabyte, is not read."""
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True, "logprobs": 20}
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((server.host, server.port))
    connection.sendall(server.request("/v1/completions", body))
    connection.recv(1)
    return connection


async def _gap(server) -> float:
    """The median of the times between two tokens, for a client that reads, in seconds."""
    stream = await server.stream({**HEALTHY, "max_tokens": 230})
    times = []
    while await stream.next() is not None:
        times.append(time.perf_counter())
    await stream.close()
    assert stream.finish_reasons == ["length"]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
