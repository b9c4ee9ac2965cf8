"""Replicas that come and go: engines that are tables, a clock that a test sets."""

from __future__ import annotations

import asyncio
import itertools
import time

from table_engine import INNOCENT, TableLauncher

from octavo.base.errors import ConfigError
from octavo.core.limits import QueueLimits
from octavo.core.routing import LeastLoaded
from octavo.core.sampling_params import SamplingParams
from octavo.core.scaling import ScalingLimits
from octavo.server.engine.elastic import Elastic
from octavo.server.engine.generation import EngineObserver, EngineState, GenerationRequest
from octavo.server.engine.replicas import ReplicaSet
from octavo.server.engine.ttft_admission import TTFTAdmission

LIMITS = ScalingLimits(1, 3, target_ttft=1.0, up_after=1.0, down_after=60.0)
_numbers = itertools.count()


class KnownPrediction(TTFTAdmission):
    """Predicts a tenth of a second for each sample that waits."""

    def predict(self, facts, stats, waiting, num_tokens):
        return 0.1 * waiting.num_samples


class Account(EngineObserver):
    def __init__(self):
        self.scaled, self.finished = [], []

    def on_scaled(self, direction):
        self.scaled.append(direction)

    def on_finished(self, generation, reason):
        self.finished.append(reason)


class Server:
    """A `ReplicaSet` with an `Elastic` whose time passes by `look`."""

    def __init__(self, create, limits):
        self.account, self.now = Account(), 0.0
        self.engine = ReplicaSet(
            create,
            limits.least,
            LeastLoaded,
            QueueLimits(None, None),
            self.account,
            ttft_admission=KnownPrediction(),
        )
        self.elastic = Elastic(self.engine, limits, self.account, clock=lambda: self.now)

    def submit(self, limit=30):
        number = next(_numbers)
        params = SamplingParams(max_tokens=900, seed=number)
        prompt = [INNOCENT, limit, number]
        return self.engine.submit(
            GenerationRequest(f"r{number}", prompt, params, time.monotonic(), streams=False)
        )

    def look(self, seconds):
        self.now += seconds
        self.elastic.look()

    @property
    def states(self):
        return [each.state for each in self.engine.replicas]


def play(main, create=lambda number: TableLauncher(), limits=LIMITS):
    async def run():
        server = Server(create, limits)
        await server.engine.start()
        try:
            await asyncio.wait_for(main(server), 60)
        finally:
            await server.engine.stop()

    asyncio.run(run())


async def until(condition):
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("it never came true")


async def texts(generations):
    return [(await each.collect())[0].token_ids for each in generations]


def test_a_rising_load_gets_a_second_replica_and_loses_no_request():
    async def main(server):
        generations = [server.submit() for _ in range(100)]
        server.look(0.0)
        assert len(server.engine.replicas) == 1
        server.look(1.0)
        assert len(server.engine.replicas) == 2
        await until(lambda: server.states == [EngineState.READY] * 2)
        generations += [server.submit() for _ in range(20)]
        answers = await texts(generations)
        assert answers == [list(range(1, 32))] * 120
        assert server.account.scaled == ["up"]
        assert set(server.account.finished) == {"stop"}

    play(main)


def test_what_is_not_needed_is_drained_and_its_requests_end_well():
    async def main(server):
        server.engine.add()
        await until(lambda: server.states == [EngineState.READY] * 2)
        running = [server.submit() for _ in range(2)]
        for _ in range(61):
            server.look(1.0)
        assert server.account.scaled == ["down"]
        assert await texts(running) == [list(range(1, 32))] * 2
        await until(lambda: len(server.engine.replicas) == 1)
        for _ in range(200):
            server.look(1.0)
        assert server.account.scaled == ["down"]

    play(main)


def test_launchers_of_replicas_that_have_gone_are_closed():
    launchers = {}

    def create(number):
        launchers[number] = TableLauncher()
        return launchers[number]

    async def main(server):
        server.engine.add()
        await until(lambda: server.states == [EngineState.READY] * 2)
        for _ in range(61):
            server.look(1.0)
        await until(lambda: launchers[1].is_closed)
        assert not launchers[0].is_closed

    play(main, create)


def test_where_there_is_no_room_nothing_is_tried_for_a_while():
    tries = []

    def create(number):
        if number:
            tries.append(number)
            raise ConfigError("no room")
        return TableLauncher()

    async def main(server):
        generations = [server.submit(limit=1) for _ in range(100)]
        for _ in range(10):
            server.look(1.0)
        assert len(tries) == 1
        server.look(31.0)
        server.look(1.0)
        server.look(1.0)
        assert len(tries) == 2
        assert server.account.scaled == []
        assert len(await texts(generations)) == 100

    play(main, create)


def test_a_replica_that_is_given_up_is_replaced():
    async def main(server):
        await until(lambda: server.states == [EngineState.READY] * 2)
        server.engine.replicas[1].supervisor.state = EngineState.FAILED
        server.look(1.0)
        await until(lambda: [each.number for each in server.engine.replicas] == [0, 2])
        await until(lambda: server.states == [EngineState.READY] * 2)

    play(main, limits=ScalingLimits(2, 3, target_ttft=1.0))
