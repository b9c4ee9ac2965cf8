"""Replicas that may be on other machines and pass KV on to each other: real processes of this one,
which a placement starts, over TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

import placed_replicas  # noqa: E402
from placed_replicas import answer, children_of, play, request, until  # noqa: E402
from slow_computing import slow_computing  # noqa: E402

from octavo.core.disaggregation import LongerThan  # noqa: E402

ALONE = ("unshare", "-rnm")
CABLE = ("here", "type", "veth", "peer", "name", "there")
SCRIPT = Path(placed_replicas.__file__).with_name("kv_on_two_machines.py")
PROMPTS = [[number, *range(20, 200)] for number in range(3, 11)]
ROLES = {
    "size": 2,
    "prefill_replicas": 1,
    "num_prefill": 1,
    "links_kv": True,
    "prefill_rule": LongerThan(20),
}


def asked(name, prompt, **more):
    return request(name, prompt=prompt, num_tokens=12, **more)


async def all_answers(engine, tag):
    work = [engine.submit(asked(f"{tag}{n}", prompt)) for n, prompt in enumerate(PROMPTS)]
    return [await answer(each) for each in work]


def received(engine) -> int:
    return engine.stats.kv_transfer_bytes_received or 0


async def until_linked(engine):
    """Ask until KV has come over a link."""
    for turn in range(2000):
        before = received(engine)
        await answer(engine.submit(asked(f"try{turn}", [100 + turn % 90, *range(40, 140)])))
        if received(engine) > before:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no KV comes")


@pytest.fixture(scope="module", autouse=True)
def slow_machine(tmp_path_factory):
    """A machine on which computing takes longer than whatever KV takes to come."""
    with slow_computing(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def expected(tiny_model):
    found = []

    async def main(engine, launchers):
        found.extend(await all_answers(engine, "a"))

    play(main, tiny_model)
    return found


def test_kv_comes_over_a_link_and_answers_are_the_same(tiny_model, expected):
    async def main(engine, launchers):
        await until_linked(engine)
        before, tokens = received(engine), engine.stats.prefix_tokens_from_peers
        assert await all_answers(engine, "b") == expected
        stats = engine.stats
        # Each prompt has 181 tokens, of which 11 blocks of 16 are whole.
        assert stats.prefix_tokens_from_peers - tokens == len(PROMPTS) * 176
        block_bytes = (received(engine) - before) // (len(PROMPTS) * 11)
        assert received(engine) - before == len(PROMPTS) * 11 * block_bytes
        assert [each.role.value for each in engine.replicas] == ["prefill", "decode"]

    play(main, tiny_model, **ROLES)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
def test_a_replica_that_dies_or_hangs_in_between(tiny_model, expected, signum, number):
    async def main(engine, launchers):
        await until_linked(engine)
        engines = engines_by_number(launchers)
        work = asyncio.create_task(all_answers(engine, "c"))
        await until(lambda: received(engine) or engine.stats.num_running)
        os.kill(engines[number], signum)
        assert await work == expected
        await until(lambda: engine.num_restarts >= 1 and all(r.is_up for r in engine.replicas))
        await until_linked(engine)  # they find each other again
        assert await all_answers(engine, "d") == expected

    play(main, tiny_model, **ROLES, engine_timeout=3.0)


def engines_by_number(launchers):
    """The processes of replicas, which are told apart by the memory that a prefill replica has."""

    def writes(pid):
        with open(f"/proc/{pid}/maps") as maps:
            return any("octavo-kv" in line and "rw-s" in line for line in maps)

    engines = children_of(launchers._opened.driver.pid)
    (prefill,) = filter(writes, engines)
    return [prefill, *(pid for pid in engines if pid != prefill)]


@pytest.mark.long
def test_kv_comes_over_a_cable_and_what_does_not_is_computed(tiny_model, expected):
    """Two namespaces of the network: neither end of a cable that is cut is told."""
    try:
        subprocess.run([*ALONE, "ip", "link", "add", *CABLE], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces for a user here: {error}")
    done = subprocess.run(
        [*ALONE, sys.executable, str(SCRIPT), str(tiny_model)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["over the cable"] == expected
    assert said["tokens from there"] >= len(PROMPTS) * 176
    assert said["cut"] == said["afterwards"] and len(said["cut"]) == len(PROMPTS)


def test_a_ticket_that_nobody_uses_harms_nothing(tiny_model, expected):
    async def main(engine, launchers):
        await until_linked(engine)
        messages = []
        take = engine.on_replica_message
        engine.on_replica_message = lambda replica, message: (
            messages.append(message["ev"]) or take(replica, message)
        )
        prefill, decode = engine.replicas
        for number in (decode.number, prefill.number, 99):
            prefill.send({"op": "invite", "replica": number})
            decode.send({"op": "invite", "replica": number})
        await until(lambda: messages.count("invited") == 3)
        await until_linked(engine)
        assert await all_answers(engine, "e") == expected
        assert engine.num_restarts == 0

    play(main, tiny_model, **ROLES)
