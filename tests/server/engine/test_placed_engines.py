"""Engines that a placement starts: real processes on this machine, linked to this one."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from placed_replicas import answer, children_of, play, request, until, until_gone

from octavo.base.errors import ConfigError, EngineError
from octavo.models.model_content import fingerprint
from octavo.server.engine.generation import EngineState
from octavo.server.engine.placed_engines import PlacedLaunchers, PlacementSettings
from octavo.settings.engine import EngineArgs

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


def the_engine(launchers):
    """The process of the only engine."""
    (pid,) = children_of(launchers._opened.driver.pid)
    return pid


def test_an_engine_answers_and_has_sensible_times(tiny_model):
    async def main(engine, launchers):
        generation = engine.submit(request("a"))
        assert len(await answer(generation)) == 40
        stats = generation.stats
        assert 0 <= stats.queue_time <= stats.ttft <= stats.e2e
        # What crosses the link is no more than the server has waited.
        assert stats.e2e <= time.monotonic() - generation.request.arrival_time

    play(main, tiny_model)


def test_an_engine_that_is_killed_starts_again_in_its_place(tiny_model):
    async def main(engine, launchers):
        expected = await answer(engine.submit(request("a", num_tokens=240)))
        generation = engine.submit(request("b", num_tokens=240))
        await until(lambda: engine.stats.num_running)
        os.kill(the_engine(launchers), 9)
        assert await answer(generation) == expected
        assert engine.num_restarts == 1

    play(main, tiny_model)


def test_the_requests_of_its_last_step_are_known(tiny_model):
    async def main(engine, launchers):
        deaths = []
        take = engine.on_replica_death
        engine.on_replica_death = lambda replica, at_work: (
            deaths.append(list(at_work)) or take(replica, at_work)
        )
        generation = engine.submit(request("victim", num_tokens=250))
        await until(lambda: engine.stats.num_running)
        os.kill(the_engine(launchers), 9)
        await until(lambda: deaths)
        assert [name.partition("#")[0] for name in deaths[0]] == ["victim"]
        generation.close()

    play(main, tiny_model)


def test_a_driver_that_is_killed_is_started_again(tiny_model):
    async def main(engine, launchers):
        driver, worker = launchers._opened.driver.pid, the_engine(launchers)
        os.kill(driver, 9)
        await asyncio.to_thread(until_gone, worker)
        await until(lambda: engine.state is EngineState.READY and engine.num_restarts == 1)
        assert launchers._opened.driver.pid != driver
        assert len(await answer(engine.submit(request("a")))) == 40

    play(main, tiny_model)


def test_replicas_share_the_memory_of_their_machine(tiny_model):
    """Each has the threads of its place, and knows how many there are of them."""

    async def main(engine, launchers):
        cores = len(os.sched_getaffinity(0))
        for replica in engine.replicas:
            assert replica.supervisor.facts.runs_as["threads"] == max(1, cores // 2)

    play(main, tiny_model, size=2)


def test_added_and_drained(tiny_model):
    async def main(engine, launchers):
        number = engine.add()
        await until(lambda: all(each.is_up for each in engine.replicas))
        workers = children_of(launchers._opened.driver.pid)
        assert len(workers) == 2
        engine.drain(number)
        await until(lambda: len(children_of(launchers._opened.driver.pid)) == 1)

    play(main, tiny_model, size="1..2")


def test_a_model_that_is_not_there_is_said(tmp_path):
    with pytest.raises(Exception, match="nothing-here"):
        play(None, tmp_path / "nothing-here")


def test_a_machine_with_another_model_is_refused_by_what_differs(tiny_model, monkeypatch):
    other = {**fingerprint(tiny_model), "digest of the model's weights": "others"}
    monkeypatch.setattr(PlacedLaunchers, "model", other)
    with pytest.raises(
        ConfigError,
        match=rf"another model at {tiny_model} than the server: digest of .*weights is others",
    ):
        play(None, tiny_model)


def test_one_gpu_by_number_cannot_be_placed(tiny_model):
    args = EngineArgs(str(tiny_model), device="cuda:1")
    launchers = PlacedLaunchers(args, PlacementSettings("this_machine", {}))
    try:
        with pytest.raises(ConfigError, match="cuda:1 is one GPU of one machine"):
            launchers.create(0).launch()._link.result(60)
    finally:
        launchers.close()


def test_another_placement_is_refused():
    launchers = PlacedLaunchers(EngineArgs("m"), PlacementSettings("slurm", {}))
    with pytest.raises(ConfigError, match="no placement called 'slurm'"):
        launchers.opened()


def test_a_closed_one_opens_nothing():
    launchers = PlacedLaunchers(EngineArgs("m"), PlacementSettings("this_machine", {}))
    launchers.close()
    with pytest.raises(EngineError):
        launchers.opened()
