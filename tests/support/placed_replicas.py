"""Replicas that a placement starts on this machine, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from octavo.core.limits import QueueLimits
from octavo.core.routing import LeastLoaded
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import GenerationRequest
from octavo.server.engine.placed_engines import PlacedLaunchers, PlacementSettings
from octavo.server.engine.replicas import ReplicaSet
from octavo.settings.engine import EngineArgs


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


# Settings of `ReplicaSet` that `play` takes, beside those of engines.
OF_SET = ("num_prefill", "links_kv", "prefill_rule", "engine_timeout")


def play(main, model, size=1, **settings):
    """Run ``main(engine, launchers)`` with a placement on this machine; nothing may be left."""
    of_set = {name: settings.pop(name) for name in OF_SET if name in settings}
    args = EngineArgs(str(model), device="cpu", data_parallel_size=size, **settings)
    launchers = PlacedLaunchers(args, PlacementSettings("this_machine", {}, patience=30.0))

    async def run():
        engine = ReplicaSet(
            launchers.create,
            args.replicas.least,
            LeastLoaded,
            QueueLimits(None, None),
            resumes_streams=True,
            **of_set,
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


def request(name, seed=1, num_tokens=40, prompt=(72, 101, 108, 108, 111)):
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
    return GenerationRequest(name, list(prompt), params, time.monotonic())


async def answer(generation):
    ids = []
    async for deltas in generation:
        ids += [token_id for delta in deltas for token_id in delta.token_ids]
    return ids
