"""The request that ends an engine is found, and no other is hurt: engines here die on purpose."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest
from pace import python_seconds
from table_engine import DEADLY, DEADLY_TO_ADD, INNOCENT, NUM_SEATS, TableLauncher

from octavo.base.errors import EngineError, QuarantinedError
from octavo.core.limits import QueueLimits
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.client import ProcessEngine
from octavo.server.engine.crash_isolation import CrashIsolation, fingerprint
from octavo.server.engine.generation import EngineState, GenerationRequest
from octavo.server.engine.waiting_queue import PendingGeneration


def play(main):
    async def run():
        launcher = TableLauncher()
        engine = ProcessEngine(launcher, QueueLimits(None, None))
        await engine.start()
        try:
            await asyncio.wait_for(main(engine, launcher), 30)
        finally:
            await engine.stop()

    asyncio.run(run())


_numbers = iter(range(1000, 10**9))


def make(kind=INNOCENT, limit=5, number=None, **fields):
    """Two of the same number are the same request."""
    prompt = [kind, limit, next(_numbers) if number is None else number]
    params = SamplingParams(max_tokens=99, seed=next(_numbers))
    return GenerationRequest(f"r{next(_numbers)}", prompt, params, time.monotonic(), **fields)


async def end_of(generation):
    """ "stop", or the type of the error. A stream has been seen as far as it came."""
    try:
        if generation.request.streams:
            async for _ in generation:
                pass
        else:
            await generation.collect()
    except Exception as error:
        return type(error)
    return generation.finish_reason


async def ends_of(generations):
    return await asyncio.gather(*map(end_of, generations))


async def next_engine(engine, launcher, count):
    """Wait for the one after the first ``count``."""
    while len(launcher.engines) == count or engine.state is not EngineState.READY:
        await asyncio.sleep(0.001)


def test_those_who_wait_notice_nothing():
    """Only those of the step that did not end are suspected, and run apart."""

    async def main(engine, launcher):
        deadly = engine.submit(make(DEADLY))
        others = [engine.submit(make()) for _ in range(50)]
        assert await end_of(deadly) is QuarantinedError
        assert set(await ends_of(others)) == {"stop"}
        assert launcher.num_deaths == 2
        alone = [launcher.seen[one.request.request_id] for one in others]
        company = NUM_SEATS - 1
        assert sum(True in times for times in alone) == company
        assert all(times[0] is False for times in alone)
        # The rest were sent again and ran beside: it did not take a step for each token of each.
        assert launcher.num_steps < 50 * 6 / 2

    play(main)


@pytest.mark.parametrize("kind", [DEADLY, DEADLY_TO_ADD])
@pytest.mark.parametrize("limit", [0, 3])
def test_it_kills_twice_and_is_refused(kind, limit):
    async def main(engine, launcher):
        number = next(_numbers)
        others = [engine.submit(make()) for _ in range(3)]
        # The same at the same time is no second chance, and no second crime.
        deadly = [engine.submit(make(kind, limit, number)) for _ in range(3)]
        assert set(await ends_of(deadly)) == {QuarantinedError}
        assert set(await ends_of(others)) == {"stop"}
        with pytest.raises(QuarantinedError):
            engine.submit(make(kind, limit, number))
        assert launcher.num_deaths == 2

    play(main)


def test_alone_it_kills_twice_too():
    async def main(engine, launcher):
        assert await end_of(engine.submit(make(DEADLY, 2))) is QuarantinedError
        assert launcher.num_deaths == 2

    play(main)


def test_leaving_early_is_no_way_out():
    """A client that does not wait for what it has done is known all the same."""

    async def main(engine, launcher):
        number = next(_numbers)
        for _ in range(2):
            count = len(launcher.engines)
            generation = engine.submit(make(DEADLY, 0, number))
            await asyncio.sleep(0)
            generation.close()
            await next_engine(engine, launcher, count)
        with pytest.raises(QuarantinedError):
            engine.submit(make(DEADLY, 0, number))

    play(main)


def test_who_meets_death_twice_by_chance_is_not_refused():
    """A suspect runs isolated: what happens to others beside it says nothing of it."""

    async def main(engine, launcher):
        unlucky = engine.submit(make(INNOCENT, 200))
        bystander = engine.submit(make(INNOCENT, 250))
        first = engine.submit(make(DEADLY, 3))
        while launcher.num_deaths < 1:
            await asyncio.sleep(0)
        others = [engine.submit(make(DEADLY, 3)) for _ in range(2)]
        assert await ends_of([first, *others]) == [QuarantinedError] * 3
        assert await ends_of([unlucky, bystander]) == ["stop", "stop"]
        with_unlucky = launcher.seen[unlucky.request.request_id]
        assert len(with_unlucky) >= 3 and all(with_unlucky[1:])

    play(main)


def test_a_stream_that_was_seen_ends_with_an_error_and_may_be_asked_again():
    async def main(engine, launcher):
        number = next(_numbers)
        streams = [engine.submit(make(INNOCENT, 20, number + i, streams=True)) for i in range(3)]
        ends = [asyncio.create_task(end_of(stream)) for stream in streams]
        assert await end_of(engine.submit(make(DEADLY, 5))) is QuarantinedError
        assert await asyncio.gather(*ends) == [EngineError] * 3
        again = [engine.submit(make(INNOCENT, 20, number + i, streams=True)) for i in range(3)]
        assert await ends_of(again) == ["stop"] * 3
        once_more = engine.submit(make(INNOCENT, 20, number, streams=True))
        assert await end_of(once_more) == "stop"
        assert launcher.seen[again[0].request.request_id] == [True]
        assert launcher.seen[once_more.request.request_id] == [False]  # acquitted

    play(main)


def test_a_death_from_outside_may_cost_whoever_is_on_probation_and_nobody_else():
    async def main(engine, launcher):
        generations = [engine.submit(make(INNOCENT, 30)) for _ in range(20)]
        for _ in range(4):
            for _ in range(10):
                await asyncio.sleep(0)
            launcher.engines[-1].is_ordered_to_die = True
            await next_engine(engine, launcher, len(launcher.engines))
            generations.append(engine.submit(make(INNOCENT, 30)))
        assert Counter(await ends_of(generations))["stop"] >= len(generations) - 3

    play(main)


@pytest.mark.parametrize("seed", range(12))
def test_any_crowd(seed):
    """Whatever comes when: the deadly are refused after two deaths each, and all others served."""

    async def client(engine, rng, kind, results):
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        limit, number = rng.randrange(12), next(_numbers)
        for _ in range(3):  # as libraries of clients do
            try:
                generation = engine.submit(make(kind, limit, number, streams=rng.random() < 0.3))
            except QuarantinedError:
                results.append((kind, QuarantinedError))
                return
            end = await end_of(generation)
            if end is not EngineError:
                break
        results.append((kind, end))

    async def main(engine, launcher):
        rng, results = random.Random(seed), []
        num_deadly = rng.randrange(1, 5)
        kinds = [rng.choice((DEADLY, DEADLY_TO_ADD)) for _ in range(num_deadly)]
        kinds += [INNOCENT] * rng.randrange(40)
        rng.shuffle(kinds)
        await asyncio.gather(*(client(engine, rng, kind, results) for kind in kinds))
        assert launcher.num_deaths <= 2 * num_deadly
        assert {end for kind, end in results if kind != INNOCENT} == {QuarantinedError}
        assert QuarantinedError not in {end for kind, end in results if kind == INNOCENT}

    play(main)


# -- what is remembered ------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_suspicions_are_forgotten(clock):
    crash_isolation = CrashIsolation(clock)
    crash_isolation.note_crash({b"a", b"b"}, had_company=False)
    assert crash_isolation.is_suspected(b"a") and not crash_isolation.is_quarantined(b"a")
    clock.now = 599.0
    crash_isolation.note_crash({b"a"}, had_company=False)
    assert crash_isolation.is_quarantined(b"a")
    clock.now = 601.0
    assert not crash_isolation.is_suspected(b"b") and crash_isolation.is_quarantined(b"a")
    clock.now = 1200.0
    assert not crash_isolation.is_suspected(b"a")


@pytest.mark.parametrize(
    "second", [({b"a", b"b"}, False), ({b"a"}, True), (set(), True)], ids=["other", "unknown", "no"]
)
def test_company_is_a_doubt(clock, second):
    crash_isolation = CrashIsolation(clock)
    fingerprints, had_company = second
    for _ in range(5):
        crash_isolation.note_crash({b"a"} | fingerprints, had_company=True)
        crash_isolation.note_crash(fingerprints, had_company=had_company)
    assert crash_isolation.is_suspected(b"a") and not crash_isolation.is_quarantined(b"a")
    crash_isolation.note_crash({b"a"}, had_company=False)
    crash_isolation.note_crash({b"a", b"b"}, had_company=False)  # what is known stays known
    assert crash_isolation.is_quarantined(b"a") and not crash_isolation.is_quarantined(b"b")


def test_memory_is_bounded(clock):
    crash_isolation = CrashIsolation(clock)
    for number in range(10_000):
        crash_isolation.note_crash({str(number).encode()}, had_company=True)
    assert not crash_isolation.is_suspected(b"5000") and crash_isolation.is_suspected(b"9999")


def test_one_at_a_time(clock):
    class Generation:
        is_over = False

    crash_isolation = CrashIsolation(clock)
    entries = [PendingGeneration(Generation(), b"") for _ in range(3)]

    def start(entry):
        entry.engine = object()
        crash_isolation.started(entry)

    for entry in [*entries, *entries]:  # twice is once
        crash_isolation.enqueue(entry)
    assert crash_isolation.next() is entries[0] is crash_isolation.next()  # not yet started
    start(entries[0])
    assert crash_isolation.is_running(entries[0]) and crash_isolation.next() is None
    entries[0].generation.is_over = entries[1].generation.is_over = True
    assert crash_isolation.next() is entries[2]
    start(entries[2])
    entries[2].engine = None  # its engine has died
    assert not crash_isolation.is_running(entries[2]) and crash_isolation.next() is None
    crash_isolation.enqueue(entries[2])
    assert crash_isolation.next() is entries[2]


# -- fingerprints ----------------------------------------------------------------------------------


def test_what_the_engine_sees_makes_a_fingerprint_and_luck_does_not():
    def of(prompt, **params):
        request = GenerationRequest("any", prompt, SamplingParams(**params), 0.0)
        return fingerprint(request)

    same = of([1, 2], seed=1, allowed_token_ids=[3])
    assert same == of([1, 2], seed=2, allowed_token_ids=[3])
    others = [
        of([1, 2], allowed_token_ids=[4]),
        of([1, 2]),
        of([1], allowed_token_ids=[2, 3]),
        of([1, 2, 3]),
        of([1, 2], allowed_token_ids=[3], temperature=0.5),
    ]
    assert len({same, *others}) == 6


def test_a_fingerprint_of_a_long_prompt_is_quick():
    """It is made on the event loop."""
    params = SamplingParams(allowed_token_ids=range(50_000))
    request = GenerationRequest("any", list(range(100_000)), params, 0.0)
    started = time.process_time()
    fingerprint(request)
    seconds = time.process_time() - started
    assert seconds < python_seconds(5e5)  # written as words it took several times as long
