"""A server whose prompts are computed on another machine, as far as the network knows:

    unshare -rnm python kv_on_two_machines.py MODEL

prints the answers to prompts whose KV comes over the cable between both; and those to others when
the cable is cut in the middle of them, and once more.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from placed_replicas import answer, request, until
from slow_computing import slow_computing
from two_machines import HERE, ON_THE_OTHER, lay_cable, run

from octavo.core.disaggregation import LongerThan
from octavo.core.limits import QueueLimits
from octavo.core.routing import LeastLoaded
from octavo.links.listener import Listener
from octavo.links.ticket import Address
from octavo.server.engine.placed_engines import OpenPlacement, PlacedLaunchers, PlacementSettings
from octavo.server.engine.replicas import ReplicaSet
from octavo.settings.engine import EngineArgs
from octavo.system.nameless_memory import open_memory

PROMPTS = [[number, *range(20, 200)] for number in range(3, 11)]
OTHERS = [[number, *range(30, 210)] for number in range(3, 11)]
NUM_TOKENS = 12


class TwoMachines:
    """A placement, as `DriverClient` has it: the first replica is on the other machine."""

    has_ended = False

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Processes end with the thread that has started them.
        self._starter = ThreadPoolExecutor(1)

    def ask(self, op: str, **fields: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result(getattr(self, f"_{op}", lambda **_: {})(**fields) or {})
        return future

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _lease(self, **_: Any) -> dict[str, Any]:
        return {"num_alike": 1}

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        where = ON_THE_OTHER.split() if name == "replica-0" else []
        fd = open_memory("record", spec["memory_bytes"])
        started = self._starter.submit(
            subprocess.Popen,
            [*where, sys.executable, "-m", spec["module"], str(fd), *spec["words"]],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
        )
        process = self._processes[name] = started.result()
        os.close(fd)
        assert process.stdin is not None
        process.stdin.write(f"{spec['secret']}\n".encode())
        process.stdin.flush()

    def _kill(self, name: str, signum: int) -> None:
        self._processes[name].send_signal(signum)

    def _end(self, name: str, seconds: float) -> dict[str, Any]:
        return {"status": str(self._processes[name].wait(seconds)), "memory": ""}


async def answers(engine: ReplicaSet, tag: str, prompts: list[list[int]]) -> list[list[int]]:
    work = [
        engine.submit(request(f"{tag}{number}", prompt=prompt, num_tokens=NUM_TOKENS))
        for number, prompt in enumerate(prompts)
    ]
    return [await answer(each) for each in work]


async def serve(model: str) -> dict[str, Any]:
    args = EngineArgs(model, data_parallel_size=2, prefill_replicas=1, threads=1, device="cpu")
    launchers = PlacedLaunchers(args, PlacementSettings("two machines", {}))
    machines = TwoMachines()
    launchers._opened = OpenPlacement(machines, Listener(Address(HERE)), 1, 0)  # type: ignore
    limits = QueueLimits(None, None)
    engine = ReplicaSet(
        *(launchers.create, 2, LeastLoaded, limits),
        num_prefill=1,
        links_kv=True,
        prefill_rule=LongerThan(20),
    )
    try:
        await engine.start()
        received, turn = 0, 0
        while not received:  # until they are linked
            warm = request(f"warm{turn}", prompt=[100 + turn % 90, *range(40, 140)], num_tokens=4)
            await answer(engine.submit(warm))
            received, turn = engine.stats.kv_transfer_bytes_received or 0, turn + 1
            await asyncio.sleep(0.01)
        over_the_cable = await answers(engine, "a", PROMPTS)
        tokens = engine.stats.prefix_tokens_from_peers
        work = asyncio.create_task(answers(engine, "b", OTHERS))
        await until(lambda: engine.stats.num_running)
        run("ip link set here down")
        cut = await work
        return {
            "over the cable": over_the_cable,
            "tokens from there": tokens,
            "cut": cut,
            "afterwards": await answers(engine, "c", OTHERS),
        }
    finally:
        machines.close()
        await engine.stop()
        launchers.close()


def main() -> None:
    lay_cable()
    with tempfile.TemporaryDirectory() as home, slow_computing(Path(home)):
        print(json.dumps(asyncio.run(serve(sys.argv[1]))))


if __name__ == "__main__":
    main()
