"""Engines that cannot be started, and what is told of it."""

from __future__ import annotations

import asyncio
import errno

import pytest
from scripted_engine import DEATH, FACTS, READY, ScriptedLauncher

from octavo.base.errors import EngineError
from octavo.server.engine import supervisor as supervisor_module
from octavo.server.engine.generation import EngineState
from octavo.server.engine.supervisor import Supervisor

REFUSAL = OSError(errno.EMFILE, "Too many open files")


class Events:
    def __init__(self, blames=False):
        self.states, self.deaths, self.blames = [], [], blames

    def on_engine_state(self, state, detail):
        self.states.append(state)

    def on_engine_message(self, message):
        raise AssertionError(message)

    def on_engine_death(self, at_work):
        self.deaths.append(list(at_work))
        return self.blames


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_RESTART_PAUSES", (0.0,) * 5)


def run(main, *script, **options):
    launcher, events = ScriptedLauncher(*script), Events(**options)

    async def with_supervisor():
        supervisor = Supervisor(launcher, events)
        try:
            await asyncio.wait_for(main(supervisor), 10)
        finally:
            await supervisor.stop()

    asyncio.run(with_supervisor())
    return launcher, events


async def replaced(supervisor, count):
    while supervisor.num_restarts < count or supervisor.state is not EngineState.READY:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (REFUSAL, "cannot be started: .*Too many open files"),
        (DEATH, "ended while it was loading .as asked."),
        ({"ev": "failed", "kind": "EngineError", "message": "no memory"}, "no memory"),
    ],
)
def test_what_keeps_the_first_one_from_starting_is_raised(line, words):
    async def main(supervisor):
        with pytest.raises(EngineError, match=words):
            await supervisor.start()
        await supervisor.wait_until_given_up()

    launcher, events = run(main, line)
    assert launcher.num_launches == 1 and events.deaths == []


@pytest.mark.parametrize("line", [REFUSAL, DEATH], ids=["refused", "dead"])
def test_a_later_one_is_tried_again(caplog, line):
    async def main(supervisor):
        await supervisor.start()
        assert supervisor.facts == FACTS
        supervisor._engine.kill()
        await replaced(supervisor, 4)

    launcher, events = run(main, READY, line, line, line, READY)
    assert launcher.num_launches == 5
    assert events.deaths == [["r1", "r2"], [], [], []]
    assert events.states[:3] == [EngineState.READY, EngineState.RESTARTING, EngineState.READY]
    words = "cannot be started" if line is REFUSAL else "ended while it was loading"
    assert [words in record.getMessage() for record in caplog.records] == [False, True, True, True]


def test_in_the_end_it_is_given_up():
    async def main(supervisor):
        await supervisor.start()
        waiting = asyncio.create_task(supervisor.wait_until_given_up())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        supervisor._engine.kill()
        await waiting

    launcher, events = run(main, READY, REFUSAL)
    assert launcher.num_launches == 5
    assert events.states[-1] is EngineState.FAILED


def test_as_long_as_requests_are_to_blame_it_goes_on():
    async def main(supervisor):
        await supervisor.start()
        for number in range(1, 12):
            supervisor._engine.kill()
            await replaced(supervisor, number)

    launcher, _ = run(main, READY, blames=True)
    assert launcher.num_launches == 12


def test_what_worked_for_a_while_is_not_given_up():
    async def main(supervisor):
        await supervisor.start()
        for number in range(1, 12):
            supervisor._engine.kill()
            await replaced(supervisor, number)
            supervisor.note_success()

    launcher, _ = run(main, READY)
    assert launcher.num_launches == 12
