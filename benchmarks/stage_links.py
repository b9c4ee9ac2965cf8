"""Measures what a stage of a pipeline costs beside its layers: a message there, and states back.

    python benchmarks/stage_links.py                         2,000 steps of one token, 576 wide
    python benchmarks/stage_links.py --tokens 512 --steps 200

The home rank sends the message of a step, and a stage that computes nothing answers with hidden
states: in shared memory, and over TCP with TLS on loopback, in turns. Prints quantiles of the time
of a step, in microseconds, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from octavo.runtime.followers import Followers
from octavo.runtime.home_connection import MAX_MESSAGE_BYTES, STEP_BYTES
from octavo.runtime.hosts import CommandHost
from octavo.runtime.rank_memory import Membership, RankMemory
from octavo.runtime.rank_process import Connection, Message
from octavo.runtime.remote_followers import RemoteFollowers
from octavo.runtime.stage_links import PipelinePlace

_MESSAGE_WORDS = 16  # of a decode step of one request


def serve(membership: Membership, settings: Message, home: Connection) -> None:
    """Answer each message with hidden states: what the process of the stage runs."""
    tokens, width = settings["tokens"], settings["width"]
    assert membership.pipeline is not None and membership.pipeline.outgoing is not None
    home.receive()
    membership.pipeline.outgoing.open([width], tokens, 2)
    values = np.ones((tokens, width), dtype=np.float32)
    home.send({"started": True})
    while True:
        number = int(membership.messages.receive()[0])
        membership.pipeline.outgoing.send(number, [values])


def step_times(
    place: PipelinePlace, steps: int, tokens: int, width: int, numbers: Callable[[], int]
) -> list[float]:
    """Return the microseconds of each step."""
    assert place.incoming is not None
    values = [np.empty((tokens, width), dtype=np.float32)]
    times = []
    for _ in range(steps):
        number = numbers()
        words = array("i", [number] * _MESSAGE_WORDS)
        begin = time.perf_counter()
        place.messages.send(words)
        place.incoming.receive(number, values)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of each kind, in ten turns")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--width", type=int, default=576)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), *sys.path])
    )
    module, settings = Path(__file__).stem, {"tokens": args.tokens, "width": args.width}
    memory = RankMemory(1, 2)
    here = Followers(module, memory, settings)
    there = RemoteFollowers(module, [CommandHost(sys.executable)], settings)
    places = {"shared memory": memory.home.pipeline, "TCP": there.place}
    for followers in (here, there):
        followers.send({STEP_BYTES: MAX_MESSAGE_BYTES})
    for place in places.values():
        assert place is not None and place.incoming is not None
        place.incoming.open([args.width], args.tokens, 2)
    for followers in (here, there):
        followers.receive()
    times: dict[str, list[float]] = {name: [] for name in places}
    counts = dict.fromkeys(places, 0)

    def numbers(name: str) -> int:
        counts[name] += 1
        return counts[name]

    for turn in range(11):
        for name, place in places.items():
            assert place is not None
            steps = args.steps // 10
            found = step_times(place, steps, args.tokens, args.width, lambda n=name: numbers(n))
            times[name] += found if turn else []  # the first one warms up
    there.close()
    here.close()
    memory.close()
    quantiles = {
        name: dict(zip(("p10", "p50", "p90"), _quantiles(each), strict=True))
        for name, each in times.items()
    }
    print(json.dumps({**settings, "steps": args.steps, "microseconds": quantiles}, indent=1))


def _quantiles(times: list[float]) -> list[float]:
    tenths = statistics.quantiles(times, n=10)
    return [round(tenths[index], 1) for index in (0, 4, 8)]


if __name__ == "__main__":
    main()
