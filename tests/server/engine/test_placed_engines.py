"""Engines that a placement starts: real processes on this machine, linked to this one."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError, EngineError
from octavo.core.limits import QueueLimits
from octavo.core.routing import LeastLoaded
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import EngineState, GenerationRequest
from octavo.server.engine.placed_engines import PlacedLaunchers, PlacementSettings
from octavo.server.engine.replicas import ReplicaSet
from octavo.serving.model_content import fingerprint
from octavo.settings.engine import EngineArgs

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


def children_of(pid):
    found = []
    for folder in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{folder}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(folder))
    return found


def play(main, model, size=1, **settings):
    """Run ``main(engine, launchers)`` with a placement on this machine; nothing may be left."""
    args = EngineArgs(str(model), device="cpu", data_parallel_size=size, **settings)
    launchers = PlacedLaunchers(args, PlacementSettings("this_machine", {}, patience=30.0))

    async def run():
        engine = ReplicaSet(
            launchers.create,
            args.replicas.least,
            LeastLoaded,
            QueueLimits(None, None),
            resumes_streams=True,
        )
        try:
            await engine.start()
            await asyncio.wait_for(main(engine, launchers), 120)
        finally:
            await engine.stop()

    pids = []
    try:
        launchers.launch_ahead()
        asyncio.run(run())
    finally:
        if launchers._opened is not None:
            pids = [launchers._opened.driver.pid, *children_of(launchers._opened.driver.pid)]
        launchers.close()
    for pid in pids:
        until_gone(pid)


def until_gone(pid):
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}/exe"):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.01)


async def until(condition):
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def request(name, seed=1, num_tokens=40):
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
    return GenerationRequest(name, [72, 101, 108, 108, 111], params, time.monotonic())


async def answer(generation):
    ids = []
    async for deltas in generation:
        ids += [token_id for delta in deltas for token_id in delta.token_ids]
    return ids


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
