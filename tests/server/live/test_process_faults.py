"""Processes that die: the engine under its clients, and the server over its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

# Prompts with these tokens make a step slow, or end the engine, each in its own way.
SLOW, EXIT, KILL, HANG = 200, 201, 202, 203
ENGINE_TIMEOUT = 2.0

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
ENDLESS = [
    {**GREEDY, "prompt": [SLOW, number], "max_tokens": 200, "stream": True} for number in range(16)
]
WHOLE = [{**GREEDY, "prompt": f"whole {number}", "max_tokens": 30} for number in range(4)]
# For these there is no room beside the others.
WAITING = [
    {**GREEDY, "prompt": f"waiting {number}", "max_tokens": 30, "stream": True}
    for number in range(4)
]


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    room = str(len(ENDLESS) + len(WHOLE))
    flags = ("--max-num-seqs", room, "--engine-timeout", str(ENGINE_TIMEOUT))
    faults = {"slow": SLOW, "exit": EXIT, "kill": KILL, "hang": HANG}
    with live_server(tiny_model, *flags, faults=faults) as server:
        yield server


def tokens_of(answer: Any) -> list[int]:
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["token_ids"]


# -- the engine dies ---------------------------------------------------------------------------


def test_killing_the_engine_under_16_streams(server):
    expected = [tokens_of(server.fetch("/v1/completions", body)) for body in WHOLE]
    expected_waiting = [server.run(server.complete(body)).token_ids for body in WAITING]

    streams, whole, waiting, ill, well = server.run(_kill_under_load(server))

    print(
        f"/health said 503 after {ill * 1e3:.0f} ms, 200 again after {well:.2f} s; "
        f"the server had started in {server.start_seconds:.2f} s"
    )
    # A start of the engine is most of that of the server, which had the machine to itself.
    assert ill < server.start_seconds
    assert well < ill + 6 * server.start_seconds
    # Streams that had begun cannot go on, and say so once.
    for stream in streams:
        assert stream.token_ids and stream.finish_reasons == []
        assert len(stream.errors) == 1 and "error" in stream.events[-1]
        assert stream.num_done == 1 and stream.is_whole
    # The others notice nothing but the time.
    assert [tokens_of(answer) for answer in whole] == expected
    for stream, token_ids in zip(waiting, expected_waiting, strict=True):
        assert stream.token_ids == token_ids and stream.errors == []
        assert stream.finish_reasons == ["length"] and stream.num_done == 1 and stream.is_whole
    load = server.wait_until_idle()
    assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)
    assert load["num_restarts"] == 1
    counters = server.counters()
    assert counters.sum("engine_restarts_total") == 1
    assert counters.sum("request_success_total", finished_reason="error") == len(ENDLESS)
    assert counters.sum("request_success_total") == counters.sum("requests_submitted_total")


async def _kill_under_load(server) -> tuple[list[Any], list[Any], list[Any], float, float]:
    """The three kinds of answers, and the seconds until ``/health`` was 503, and 200 again."""
    streams = await asyncio.gather(*(server.stream(body) for body in ENDLESS))
    whole = [asyncio.create_task(server.ask("/v1/completions", body)) for body in WHOLE]
    await _until_load(server, num_running=len(ENDLESS) + len(WHOLE))
    waiting = [asyncio.create_task(server.complete(body)) for body in WAITING]
    await _until_load(server, num_waiting=len(WAITING))
    for stream in streams:
        await stream.next()
    os.kill(server.engine_pid, signal.SIGKILL)
    killed = time.perf_counter()
    ill = await _until_health(server, 503) - killed
    well = await _until_health(server, 200) - killed
    for stream in streams:
        await stream.rest()
    return streams, await asyncio.gather(*whole), await asyncio.gather(*waiting), ill, well


async def _until_load(server, **wanted: int) -> None:
    async with asyncio.timeout(30):
        while not wanted.items() <= (await server.ask("/load")).json().items():
            await asyncio.sleep(0.01)


async def _until_health(server, status: int) -> float:
    async with asyncio.timeout(90):
        while (await server.ask("/health")).status != status:
            await asyncio.sleep(0.01)
    return time.perf_counter()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSTOP], ids=lambda each: each.name)
def test_an_engine_that_ends_or_stops_is_replaced(server, signum):
    body = {**GREEDY, "prompt": f"through {signum.name}", "max_tokens": 20}
    expected = tokens_of(server.fetch("/v1/completions", body))
    before, restarts = server.engine_pid, server.load()["num_restarts"]

    async def ask_while_it_ends() -> Any:
        os.kill(before, signum)
        return await server.ask("/v1/completions", body)

    assert tokens_of(server.run(ask_while_it_ends())) == expected
    assert server.engine_pid != before
    assert server.load()["num_restarts"] == restarts + 1


def test_an_interrupt_is_not_for_the_engine(server):
    before = server.engine_pid
    os.kill(before, signal.SIGINT)
    tokens_of(server.fetch("/v1/completions", {**GREEDY, "prompt": "a", "max_tokens": 5}))
    assert server.engine_pid == before


# -- queries of death --------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "streams"), [(EXIT, False), (KILL, True), (HANG, False)])
def test_a_query_of_death_kills_twice_at_most(server, token, streams):
    healthy = {**GREEDY, "prompt": f"beside {token}", "max_tokens": 20}
    expected = tokens_of(server.fetch("/v1/completions", healthy))
    restarts = server.load()["num_restarts"]
    deadly = {**GREEDY, "prompt": [1, token], "max_tokens": 5, "stream": streams}

    async def ask_both() -> list[Any]:
        asked = (deadly, healthy, deadly)
        return await asyncio.gather(*(server.ask("/v1/completions", body) for body in asked))

    first, other, second = server.run(ask_both())
    restarted = server.load()["num_restarts"]
    third = server.fetch("/v1/completions", {**deadly, "seed": 5})  # luck does not matter

    for answer in (first, second, third):
        assert answer.status == 500, answer.body
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
    assert tokens_of(other) == expected
    # Both were running when it died for the first time, and either may be blamed alone; the third
    # was not tried again.
    assert server.load()["num_restarts"] == restarted <= restarts + 2
    assert tokens_of(server.fetch("/v1/completions", healthy)) == expected


def test_a_hanging_engine_says_where(server):
    """By its last words, on which it was put by the signal that ended it."""
    assert any("no sign of life" in line for line in server.log)
    assert any("faulty.py" in line for line in server.log)


# -- the server dies ---------------------------------------------------------------------------


def test_nothing_outlives_a_killed_server(live_server, tiny_model):
    with live_server(tiny_model) as server:
        children = server.descendants()
        assert children
        connection = server.connect()
        server.signal(signal.SIGKILL)
        assert server.wait(2) == -signal.SIGKILL
        _check_gone(children, time.monotonic() + 2)
        connection.close()
        with socket.socket() as listener:  # as the next server would do
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((server.host, server.port))
            listener.listen()


def test_control_c_ends_it_quietly(live_server, tiny_model, ctrl_c):
    with live_server(tiny_model) as server:
        children = server.descendants()
        os.killpg(server.process.pid, signal.SIGINT)  # a terminal sends it to all of them
        assert server.wait(10) == 0
        _check_gone(children, time.monotonic() + 2)
    assert not [line for line in server.log if "Traceback" in line or "KeyboardInterrupt" in line]


def test_an_engine_that_dies_while_it_loads_ends_the_server(live_server, tiny_model):
    with live_server(tiny_model, waits=False) as server:
        deadline = time.monotonic() + 60
        while not server.engine_pids():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait(10) == 1
    assert len(server.log) == 1 and "ended while it was loading" in server.log[0]


def _check_gone(pids: list[int], deadline: float) -> None:
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)
