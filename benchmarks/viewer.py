"""What the dashboard costs the engine that it shows: rounds with and without a viewer, in turns.

    python benchmarks/viewer.py [MODEL] [--streams 16] [--seconds 4] [--pairs 14] [--viewers 1]

One server lives through all rounds, under a load of streams that never ends. A viewer is a client
that reads what the page is sent, and throws it away: a browser draws on a machine of its own.

On a machine that others use, tokens a second vary by more than a viewer costs. So what a viewer
adds to each step is measured, too: the processor time of the server's process (which only Linux
tells), and the time of the engine between two steps. Their sum over the time of a step is what it
would cost if each moment of both held up the engine: more than it does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.serving.http_client import HttpClient, Response
from octavo.bench.serving.server_process import running_server
from octavo.measure.statistics import bootstrap_interval

# A round should not differ from the next one by the requests that begin in it: few do.
PROMPT_TOKENS, ANSWER_TOKENS = 32, 1024
VOCABULARY = 1000
SETTLING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals since the server began, read at the end of a step."""

    time: float
    tokens: float
    steps: float
    step_seconds: float
    server_seconds: float  # of processor time


@dataclass(frozen=True, slots=True)
class Round:
    """Between two readings. Times are microseconds of a step."""

    tokens_per_s: float
    step: float
    server: float
    between_steps: float

    @classmethod
    def of(cls, a: Reading, b: Reading) -> Round:
        elapsed, scale = b.time - a.time, 1e6 / (b.steps - a.steps)
        return cls(
            (b.tokens - a.tokens) / elapsed,
            elapsed * scale,
            (b.server_seconds - a.server_seconds) * scale,
            (elapsed - (b.step_seconds - a.step_seconds)) * scale,
        )


class Load:
    """Streams that are asked for again as soon as they end; each begins at a time of its own."""

    def __init__(self, url: str, num_streams: int):
        self._client = HttpClient(url)
        self._rng = random.Random(0)
        self._streams = [asyncio.create_task(self._run()) for _ in range(num_streams)]

    async def _run(self) -> None:
        num_tokens = self._rng.randint(1, ANSWER_TOKENS)
        while True:
            body = {
                "prompt": self._rng.choices(range(VOCABULARY), k=PROMPT_TOKENS),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            await ask(self._client, "POST", "/v1/completions", json.dumps(body).encode())
            num_tokens = ANSWER_TOKENS

    async def close(self) -> None:
        for stream in self._streams:
            stream.cancel()
        ended = await asyncio.gather(*self._streams, return_exceptions=True)
        await self._client.close()
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a stream failed") from error


async def ask(client: HttpClient, method: str, path: str, body: bytes = b"") -> None:
    """Read an answer, or what there is of it until this is cancelled, and forget it."""
    response = Response()
    await client.request(method, path, body, response, lambda data, when: None)
    if response.status != 200:
        raise RuntimeError(f"{path}: status {response.status}")


@contextlib.asynccontextmanager
async def viewers(url: str, count: int) -> AsyncIterator[None]:
    client = HttpClient(url, keep_alive=False)
    watching = [
        asyncio.create_task(ask(client, "GET", "/steps?snapshots=true")) for _ in range(count)
    ]
    try:
        yield
        assert not any(each.done() for each in watching), "a viewer was sent away"
    finally:
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


class Server:
    """What is read of a server from outside."""

    def __init__(self, url: str):
        self._client = HttpClient(url)
        (self._pid,) = _children(os.getpid())

    async def read(self) -> Reading:
        """As a step ends."""
        before = (await self._load())["step_id"]
        while (load := await self._load())["step_id"] == before:
            pass
        now, server_seconds = time.perf_counter(), _processor_seconds(self._pid)
        _, text = await self._client.fetch("GET", "/metrics?names=plain")
        (tokens,) = re.findall(r"^octavo_generation_tokens_total\S* (\S+)", text.decode(), re.M)
        return Reading(now, float(tokens), load["step_id"], load["step_seconds"], server_seconds)

    async def _load(self) -> dict[str, float]:
        _, body = await self._client.fetch("GET", "/load")
        found: dict[str, float] = json.loads(body)
        return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


async def measure(url: str, options: argparse.Namespace) -> list[tuple[Round, Round]]:
    """Pairs of rounds, without and with viewers; which comes first takes turns."""
    server, load = Server(url), Load(url, options.streams)
    pairs = []
    try:
        await asyncio.sleep(4 * SETTLING_SECONDS)
        for number in range(options.pairs):
            rounds = {}
            for is_watched in (number % 2 == 0, number % 2 == 1):
                async with viewers(url, options.viewers if is_watched else 0):
                    await asyncio.sleep(SETTLING_SECONDS)
                    begin = await server.read()
                    await asyncio.sleep(options.seconds)
                    rounds[is_watched] = Round.of(begin, await server.read())
            pairs.append((rounds[False], rounds[True]))
    finally:
        await load.close()
    return pairs


def report(pairs: Sequence[tuple[Round, Round]]) -> dict[str, object]:
    """Medians over pairs, with their intervals of 95 %."""

    def median(value: Callable[[Round, Round], float]) -> list[float]:
        values = [value(*pair) for pair in pairs]
        interval = bootstrap_interval(values, statistics.median, rounds=2000)
        return [round(each, 4) for each in (statistics.median(values), *interval)]

    return {
        "pairs": len(pairs),
        "tokens_per_s": median(lambda a, b: a.tokens_per_s),
        "ratio": median(lambda a, b: b.tokens_per_s / a.tokens_per_s),
        "step_us": median(lambda a, b: a.step),
        "server_us": median(lambda a, b: a.server),
        "between_steps_us": median(lambda a, b: a.between_steps),
        "added_server_us": median(lambda a, b: b.server - a.server),
        "added_between_steps_us": median(lambda a, b: b.between_steps - a.between_steps),
        "cost_at_most": median(
            lambda a, b: (b.server - a.server + b.between_steps - a.between_steps) / a.step
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round")
    parser.add_argument("--pairs", type=int, default=14)
    parser.add_argument("--viewers", type=int, default=1)
    options = parser.parse_args()
    with running_server(options.model) as url:
        pairs = asyncio.run(measure(url, options))
    print(json.dumps(report(pairs)))


if __name__ == "__main__":
    main()
