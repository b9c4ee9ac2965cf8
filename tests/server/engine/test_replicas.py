"""Several engines behind one queue: engines that are tables, and the hash model in threads."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hash_model import expected_tokens
from simulating import at_times, fleet_spec
from table_engine import DEADLY, INNOCENT, NUM_SEATS, TableLauncher
from thread_engine import NUM_BLOCKS, VOCAB, ThreadLauncher

from octavo.base.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
)
from octavo.core.limits import QueueLimits
from octavo.core.routing import Ask, LeastLoaded, PrefixAware, RoundRobin
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats, summed
from octavo.server.engine import replicas
from octavo.server.engine.generation import EngineObserver, EngineState, GenerationRequest
from octavo.server.engine.replicas import ReplicaSet
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.settings import ROUTER_NAMES
from octavo.sim.prompts import PromptSpec

_numbers = iter(range(1000, 10**9))


class Account(EngineObserver):
    """What was told: every request must be submitted once and finished once."""

    def __init__(self):
        self.submitted, self.finished, self.tokens = [], {}, Counter()
        self.states, self.removed, self.routed = [], [], Counter()

    def on_submitted(self, generation):
        self.submitted.append(generation.request.request_id)

    def on_finished(self, generation, reason):
        assert generation.request.request_id not in self.finished
        self.finished[generation.request.request_id] = reason

    def on_tokens(self, generation, num_tokens, gap):
        self.tokens[generation.request.tenant] += num_tokens

    def on_engine_state(self, state, detail, replica=None):
        self.states.append((replica, state))

    def on_routed(self, replica):
        self.routed[replica] += 1

    def on_removed(self, replica):
        self.removed.append(replica)


def play(main, size=2, router=None, create=TableLauncher, **options):
    """Run ``main(engine, launchers, account)``; nothing may be left behind."""

    async def run():
        launchers, account = {}, Account()

        def create_launcher(number):
            if number >= 6:
                raise ConfigError("no room for one more")
            return launchers.setdefault(number, create())

        engine = ReplicaSet(
            create_launcher,
            size,
            lambda: router or LeastLoaded(),
            options.pop("limits", QueueLimits(None, None)),
            account,
            **options,
        )
        try:
            await engine.start()
            await asyncio.wait_for(main(engine, launchers, account), 60)
        finally:  # as the server does, also where one of them has not started
            await engine.stop()
        assert sorted(account.submitted) == sorted(account.finished)
        assert engine.num_unfinished == 0 and engine.stats.num_waiting == 0
        assert all(not replica.entries for replica in engine.replicas)

    asyncio.run(run())


def make(kind=INNOCENT, limit=5, number=None, **fields):
    """Two of the same number are the same request; its tokens are 1, 2, ... limit + 1."""
    prompt = fields.pop("prompt", None) or [
        kind,
        limit,
        next(_numbers) if number is None else number,
    ]
    params = fields.pop("params", None) or SamplingParams(max_tokens=900, seed=next(_numbers))
    return GenerationRequest(f"r{next(_numbers)}", prompt, params, time.monotonic(), **fields)


async def answer_of(generation):
    """All token ids, as they come; or the type of the error."""
    ids = []
    try:
        if generation.request.streams:
            async for deltas in generation:
                ids += [token_id for delta in deltas for token_id in delta.token_ids]
        else:
            ids = (await generation.collect())[0].token_ids
    except Exception as error:
        return type(error)
    return ids


def whole(generation):
    return list(range(1, generation.request.prompt_token_ids[1] + 2))


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition):
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("it never came true")


def kill(launchers, number):
    launchers[number].engines[-1].is_ordered_to_die = True


def test_names_of_routers_are_those_of_the_core():
    from octavo.core.routing import ROUTERS

    assert set(ROUTER_NAMES) == set(ROUTERS)


# -- the queue and the router --------------------------------------------------------------------


def test_all_replicas_answer():
    async def main(engine, launchers, account):
        generations = [engine.submit(make(streams=i % 2 == 0)) for i in range(40)]
        assert await asyncio.gather(*map(answer_of, generations)) == list(map(whole, generations))
        assert set(account.routed) == {0, 1, 2}
        assert sum(account.routed.values()) == 40

    play(main, 3)


def test_requests_wait_here_until_there_is_a_place():
    """No replica gets many more than run at once, so that none waits at one for its turn while
    another one is idle."""

    async def main(engine, launchers, account):
        most = NUM_SEATS + max(1, NUM_SEATS // 4)
        generations = [engine.submit(make()) for _ in range(100)]
        assert [len(replica.entries) for replica in engine.replicas] == [most, most]
        assert engine.stats.num_waiting == 100 - 2 * most
        assert await asyncio.gather(*map(answer_of, generations)) == list(map(whole, generations))

    play(main)


def test_limits_are_of_all_replicas():
    async def main(engine, launchers, account):
        for _ in range(8):
            engine.submit(make())
        with pytest.raises(QueueFullError):
            engine.check_capacity()

    play(main, limits=QueueLimits(8, None))


@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, PrefixAware])
def test_tenants_get_their_shares_whatever_the_router(router):
    """Three that always have requests waiting, one with twice the weight: of all replicas together
    it gets twice what the others get."""

    async def client(engine, tenant, weight, answers):
        number = next(_numbers)
        while True:
            generation = engine.submit(make(INNOCENT, 4, number, tenant=tenant, weight=weight))
            assert await answer_of(generation) == whole(generation)
            answers[tenant] += 1

    async def main(engine, launchers, account):
        answers = Counter()
        weights = {"heavy": 2.0, "a": 1.0, "b": 1.0}
        clients = [
            asyncio.create_task(client(engine, tenant, weight, answers))
            for tenant, weight in weights.items()
            for _ in range(30)
        ]
        await until(lambda: answers.total() > 1000)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        shares = {tenant: count / answers.total() for tenant, count in answers.items()}
        assert shares["heavy"] == pytest.approx(0.5, abs=0.06), shares
        assert shares["a"] == pytest.approx(0.25, abs=0.06), shares

    play(main, router=router())


def test_a_few_requests_are_not_behind_a_flood():
    async def main(engine, launchers, account):
        flood = [engine.submit(make(INNOCENT, 20, tenant="flood")) for _ in range(300)]
        await turns(10)
        few = [engine.submit(make(INNOCENT, 5, tenant="few")) for _ in range(4)]
        assert await asyncio.gather(*map(answer_of, few)) == list(map(whole, few))
        assert sum(one.is_over for one in flood) < 100
        await asyncio.gather(*map(answer_of, flood))

    play(main)


def test_a_priority_goes_first():
    async def main(engine, launchers, account):
        later = [engine.submit(make(INNOCENT, 20)) for _ in range(100)]
        urgent = engine.submit(make(INNOCENT, 5, priority=-10))
        assert await answer_of(urgent) == whole(urgent)
        assert sum(one.is_over for one in later) < 40
        await asyncio.gather(*map(answer_of, later))

    play(main)


def test_prefixes_meet_again(byte_tokenizer):
    """Prompts with a common beginning go where it is cached, and the router learns what was."""

    async def main(engine, launchers, account):
        for turn in range(3):
            for family in range(4):
                prompt = [family * 9 + i % 9 for i in range(24)] + [turn]
                params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
                generation = engine.submit(make(params=params, prompt=prompt))
                assert await answer_of(generation) == expected_tokens(prompt, 4, VOCAB)
                assert generation.stats.num_cached_tokens == (24 if turn else 0)

    play(main, router=PrefixAware(), create=lambda: ThreadLauncher(byte_tokenizer))


def test_a_prediction_is_of_the_replica_with_least_to_do():
    """And of its part of what waits."""

    async def main(engine, launchers, account):
        busy, idle = (replace(StepStats.idle(100), num_due_tokens=n) for n in (500, 20))
        engine.replicas[0].stats, engine.replicas[1].stats = busy, idle
        generations = [engine.submit(make()) for _ in range(4)]
        stats, waiting = engine._load_before("", 10)
        assert stats is idle and (waiting.num_samples, waiting.num_tokens) == (2, 6)
        assert await asyncio.gather(*map(answer_of, generations)) == list(map(whole, generations))

    play(main, ttft_admission=TTFTAdmission(1000.0))


def test_what_fits_is_what_fits_in_the_smallest(byte_tokenizer):
    async def main(engine, launchers, account):
        assert engine.facts.num_blocks == NUM_BLOCKS
        smaller = replace(engine.replicas[1].supervisor.facts, num_blocks=8, max_model_len=32)
        engine.replicas[1].supervisor.facts = smaller
        launchers[0].current.kill()
        await until(lambda: engine.num_restarts == 1 and engine.replicas[0].is_up)
        assert engine.facts.max_model_len == 32
        with pytest.raises(PromptTooLongError):
            engine.submit(make(prompt=[1] * 40, params=SamplingParams(max_tokens=4)))

    play(main, create=lambda: ThreadLauncher(byte_tokenizer))


def test_a_long_prompt_is_keyed_in_turns_and_keeps_its_place(monkeypatch):
    """Others go on meanwhile; the keys are those that were made at once."""
    monkeypatch.setattr(replicas, "_KEYS_AT_ONCE", 2)
    tokens = list(range(80))

    async def main(engine, launchers, account):
        generation = engine.submit(make(prompt=[INNOCENT, 5, *tokens], cache_salt="a"))
        (entry,) = engine._entries.values()
        assert not entry.is_queued and not entry.is_sent
        short = engine.submit(make())
        closed = engine.submit(make(prompt=[INNOCENT, 6, *tokens]))
        closed.close()
        assert await answer_of(short) == whole(short)
        assert await answer_of(generation) == whole(generation)
        assert entry.ask == Ask.of([INNOCENT, 5, *tokens], 16, "a")

    play(main, router=PrefixAware())


def test_a_closed_generation_leaves_the_queue():
    async def main(engine, launchers, account):
        generations = [engine.submit(make(INNOCENT, 50)) for _ in range(40)]
        for generation in generations:
            generation.close()
        assert engine.num_unfinished == 0 and engine.stats.num_waiting == 0
        again = engine.submit(make())
        assert await answer_of(again) == whole(again)

    play(main)


# -- deaths --------------------------------------------------------------------------------------


def test_the_streams_of_others_notice_nothing():
    async def main(engine, launchers, account):
        generations = [engine.submit(make(INNOCENT, 60, streams=True)) for _ in range(8)]
        on = {n: [e.generation for e in engine.replicas[n].entries] for n in (0, 1)}
        answers = [asyncio.create_task(answer_of(one)) for one in generations]
        await turns(10)
        kill(launchers, 0)
        found = dict(zip(generations, await asyncio.gather(*answers), strict=True))
        assert all(found[one] == whole(one) for one in on[1])
        assert all(found[one] is EngineError for one in on[0])
        await until(lambda: engine.replicas[0].state is EngineState.READY)
        assert engine.num_restarts == 1 and launchers[1].num_deaths == 0
        assert [n for n, state in account.states if state is EngineState.RESTARTING] == [0]

    play(main)


def test_what_a_dead_replica_had_not_begun_goes_to_others_at_once():
    async def main(engine, launchers, account):
        generations = [engine.submit(make(INNOCENT, 30)) for _ in range(14)]
        victims = [entry.generation for entry in engine.replicas[0].entries]
        launchers[0].launch = lambda: (_ for _ in ()).throw(OSError("no more processes"))
        kill(launchers, 0)
        assert await asyncio.gather(*map(answer_of, generations)) == list(map(whole, generations))
        assert victims and engine.replicas[0].state is not EngineState.READY
        assert engine.state is EngineState.READY

    play(main)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("copies", [0, 40])
@pytest.mark.parametrize("resumes", [False, True])
def test_what_kills_an_engine_kills_no_more_than_two(size, copies, resumes):
    """Where the same is sent many times at once, no replica meets it twice but one."""

    async def main(engine, launchers, account):
        number = next(_numbers)
        streams = [engine.submit(make(INNOCENT, 80, streams=True)) for _ in range(2 * size)]
        answers = [asyncio.create_task(answer_of(one)) for one in streams]
        await turns(10)
        deadly = [engine.submit(make(DEADLY, 0, number)) for _ in range(1 + copies)]
        assert set(await asyncio.gather(*map(answer_of, deadly))) == {QuarantinedError}
        with pytest.raises(QuarantinedError):
            engine.submit(make(DEADLY, 0, number))
        for one, found in zip(streams, await asyncio.gather(*answers), strict=True):
            assert found == whole(one) or (found is EngineError and not resumes)
        num_deaths = sum(launcher.num_deaths for launcher in launchers.values())
        assert num_deaths <= (size + 1 if copies else 2)

    play(main, size, resumes_streams=resumes)


@pytest.mark.parametrize("size", [2, 4])
def test_a_poisonous_request_costs_the_streams_of_one_replica(size):
    async def main(engine, launchers, account):
        streams = [engine.submit(make(INNOCENT, 300, streams=True)) for _ in range(4 * size)]
        answers = [asyncio.create_task(answer_of(one)) for one in streams]
        await turns(10)
        deadly = engine.submit(make(DEADLY, 4))
        assert await answer_of(deadly) is QuarantinedError
        assert sorted(launcher.num_deaths for launcher in launchers.values())[-2:] == [0, 2]
        found = await asyncio.gather(*answers)
        assert Counter(type(ids) is list for ids in found) == {True: 4 * (size - 1), False: 4}

    play(main, size)


def test_others_go_on_while_a_suspect_runs():
    async def main(engine, launchers, account):
        suspect = engine.submit(make(INNOCENT, 2000))
        await turns(6)
        victim = next(one.number for one in engine.replicas if one.entries)
        kill(launchers, victim)
        await until(lambda: launchers[victim].num_deaths == 1)
        others = [engine.submit(make()) for _ in range(100)]
        assert await asyncio.gather(*map(answer_of, others)) == list(map(whole, others))
        assert not suspect.is_over
        assert await answer_of(suspect) == whole(suspect)

    play(main)


def test_suspects_that_have_passed_the_point_of_the_crash_share_steps_again():
    """Else streams of a replica that was killed would go on one after the other."""

    async def main(engine, launchers, account):
        streams = [engine.submit(make(INNOCENT, 400, streams=True)) for _ in range(8)]
        answers = [asyncio.create_task(answer_of(one)) for one in streams]
        await turns(40)
        kill(launchers, 0)
        await until(lambda: launchers[0].num_deaths == 1)
        num_steps = sum(launcher.num_steps for launcher in launchers.values())
        assert await asyncio.gather(*answers) == list(map(whole, streams))
        # One by one to their ends, it would have been four times 360 on top of the others' steps.
        assert sum(launcher.num_steps for launcher in launchers.values()) - num_steps < 1200

    play(main, resumes_streams=True)


@pytest.mark.parametrize("limit", [40, 100])
def test_one_that_kills_at_another_point_is_found_at_its_third_death(limit):
    """Here an engine is ordered to die beside it, before it does so itself."""

    async def main(engine, launchers, account):
        deadly = engine.submit(make(DEADLY, limit))
        others = [engine.submit(make(INNOCENT, 300)) for _ in range(8)]
        await turns(8)
        victim = next(
            n for n in (0, 1) if any(e.generation is deadly for e in engine.replicas[n].entries)
        )
        kill(launchers, victim)
        assert await answer_of(deadly) is QuarantinedError
        assert await asyncio.gather(*map(answer_of, others)) == list(map(whole, others))
        assert sum(launcher.num_deaths for launcher in launchers.values()) <= 3

    play(main)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("resumes", [False, True])
def test_engines_that_die_at_random_lose_nothing_and_answer_nothing_twice(seed, resumes):
    async def client(engine, rng, seen):
        await turns(rng.randrange(150))
        generation = engine.submit(
            make(INNOCENT, rng.randrange(30), streams=rng.random() < 0.5, tenant=rng.choice("ab"))
        )
        if rng.random() < 0.1:
            await turns(rng.randrange(20))
            return generation.close()
        ids = await answer_of(generation)
        seen[ids == whole(generation)] += 1
        if resumes or not generation.request.streams:
            assert ids == whole(generation) or ids is QuarantinedError, ids
        else:
            assert ids == whole(generation) or ids in (EngineError, QuarantinedError), ids

    async def main(engine, launchers, account):
        rng, seen = random.Random(seed), Counter()
        clients = [asyncio.create_task(client(engine, rng, seen)) for _ in range(80)]
        while not all(each.done() for each in clients):
            await turns(rng.randrange(60))
            if rng.random() < 0.3 and sum(each.num_deaths for each in launchers.values()) < 12:
                kill(launchers, rng.randrange(3))
        await asyncio.gather(*clients)
        assert seen[False] < 40

    play(main, 3, router=random.Random(seed).choice([RoundRobin, LeastLoaded, PrefixAware])(),
         resumes_streams=resumes)  # fmt: skip


def test_the_server_ends_when_all_have_given_up():
    async def main(engine, launchers, account):
        ending = asyncio.create_task(engine.wait_until_given_up())
        for number in (0, 1):
            launcher = launchers[number]
            launcher.launch = lambda: (_ for _ in ()).throw(OSError("no more processes"))
        waiting = [engine.submit(make(INNOCENT, 10**6)) for _ in range(3)]
        kill(launchers, 0)
        await until(lambda: engine.replicas[0].state is EngineState.FAILED)
        assert engine.state is EngineState.READY and not ending.done()
        kill(launchers, 1)
        await asyncio.wait_for(ending, 20)
        assert engine.has_given_up
        for generation in waiting:
            assert await answer_of(generation) in (EngineUnavailableError, QuarantinedError)
        with pytest.raises(EngineUnavailableError):
            engine.submit(make())

    import octavo.server.engine.supervisor as module

    pauses = module._RESTART_PAUSES
    module._RESTART_PAUSES = (0.0,) * len(pauses)
    try:
        play(main)
    finally:
        module._RESTART_PAUSES = pauses


def test_a_replica_that_cannot_start_ends_the_start(byte_tokenizer):
    def create():
        launcher = ThreadLauncher(byte_tokenizer)
        launcher.failure = {"kind": "ConfigError", "message": "no memory", "field": None}
        return launcher

    async def main(engine, launchers, account):
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="no memory"):
        play(main, create=create)


# -- streams that go on --------------------------------------------------------------------------


def test_streams_go_on_at_another_replica(byte_tokenizer):
    """The tokens, the text and the usage are those of an undisturbed run."""

    async def main(engine, launchers, account):
        prompts = [[i, i + 1, i + 2] for i in range(10)]
        for launcher in launchers.values():
            launcher.current.executor.delay = 0.01
        generations = []
        for prompt in prompts:
            params = SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True)
            generations.append(engine.submit(make(params=params, prompt=prompt, streams=True)))

        async def read(generation):
            ids, text = [[], []], ["", ""]
            async for deltas in generation:
                for delta in deltas:
                    ids[delta.index] += delta.token_ids
                    text[delta.index] += delta.text
            return ids, text

        reading = [asyncio.create_task(read(one)) for one in generations]
        await until(lambda: all(one.stats.num_output_tokens > 6 for one in generations))
        launchers[0].current.kill()
        for prompt, one, found in zip(
            prompts, generations, await asyncio.gather(*reading), strict=True
        ):
            expected = expected_tokens(prompt, 40, VOCAB)
            ids, text = found
            assert ids[0] == expected and text[0] == byte_tokenizer.decode(expected)
            assert one.finish_reason == "length"
            stats = one.stats
            assert stats.num_output_tokens == 80 and stats.num_longest_tokens == 40
            assert stats.num_prompt_tokens == 3 and stats.num_cached_tokens == 0
            assert 0 <= stats.ttft <= stats.e2e
            assert 0 < stats.tpot <= stats.e2e - stats.ttft
        await until(lambda: engine.num_restarts == 1)

    play(main, create=lambda: ThreadLauncher(byte_tokenizer), resumes_streams=True)


# -- operators -----------------------------------------------------------------------------------


def test_a_drained_replica_ends_when_its_last_request_is_over():
    async def main(engine, launchers, account):
        first = [engine.submit(make(INNOCENT, 100, streams=True)) for _ in range(6)]
        answers = [asyncio.create_task(answer_of(one)) for one in first]
        await turns(6)
        assert engine.replicas[0].entries
        engine.drain(0)
        engine.drain(0)  # once more is no error
        assert engine.describe()[0]["state"] == "draining"
        routed = account.routed[0]
        others = [engine.submit(make()) for _ in range(30)]
        assert await asyncio.gather(*map(answer_of, others)) == list(map(whole, others))
        assert account.routed[0] == routed
        assert await asyncio.gather(*answers) == list(map(whole, first))
        await until(lambda: account.removed == [0])
        assert [one["replica"] for one in engine.describe()] == [1]
        with pytest.raises(ConfigError, match="last"):
            engine.drain(1)
        with pytest.raises(KeyError):
            engine.drain(0)

    play(main)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_removed_replica_gives_its_requests_to_others(resumes):
    async def main(engine, launchers, account):
        waiting = [engine.submit(make(INNOCENT, 40)) for _ in range(12)]
        streams = [engine.submit(make(INNOCENT, 40, streams=True)) for _ in range(2)]
        answers = [asyncio.create_task(answer_of(one)) for one in streams]
        await turns(4)
        engine.remove(0)
        assert await asyncio.gather(*map(answer_of, waiting)) == list(map(whole, waiting))
        for one, found in zip(streams, await asyncio.gather(*answers), strict=True):
            assert found == whole(one) or (found is EngineError and not resumes)
        assert account.removed == [0] and launchers[1].num_deaths == 0

    play(main, resumes_streams=resumes)


def test_an_added_replica_takes_its_share_of_what_waits():
    async def main(engine, launchers, account):
        generations = [engine.submit(make(INNOCENT, 20)) for _ in range(80)]
        assert engine.add() == 1
        assert engine.add() == 2
        assert await asyncio.gather(*map(answer_of, generations)) == list(map(whole, generations))
        assert account.routed[1] > 10 and account.routed[2] > 10
        for _ in range(3):
            engine.add()
        with pytest.raises(ConfigError, match="no room"):
            engine.add()
        engine.drain(0)
        await until(lambda: account.removed == [0])
        again = engine.submit(make())
        assert await answer_of(again) == whole(again)

    play(main, 1)


def test_an_added_replica_that_does_not_start_leaves(byte_tokenizer):
    async def main(engine, launchers, account):
        number = engine.add()
        launchers[number].failure = {"kind": "ConfigError", "message": "no", "field": None}
        await until(lambda: account.removed == [number])
        assert len(engine.replicas) == 2 and engine.state is EngineState.READY

    play(main, create=lambda: ThreadLauncher(byte_tokenizer))


# -- as in a simulation --------------------------------------------------------------------------


@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, PrefixAware])
@pytest.mark.parametrize("size", [2, 3])
def test_choices_are_those_of_a_simulation_of_the_same_trace(byte_tokenizer, router, size):
    """A few at once, from a few families, with pools that are too small for all of them."""
    draw = random.Random(size)
    groups = []
    for group in range(30):
        families = draw.choices(range(6), k=draw.randrange(1, 4))
        groups.append([(range(f * 14, f * 14 + 24), range(group, group + 6)) for f in families])
    prompts = [
        PromptSpec(f"{group}-{number}", parts, 5)
        for group, prompts in enumerate(groups)
        for number, parts in enumerate(prompts)
    ]
    times = [10.0 * group for group, prompts in enumerate(groups) for _ in prompts]
    spec = fleet_spec(
        num_replicas=size,
        router={RoundRobin: "round_robin", LeastLoaded: "least_loaded"}.get(router, "prefix_aware"),
        num_blocks=NUM_BLOCKS,
        block_size=4,
        max_num_seqs=8,
        max_model_len=64,
        max_num_batched_tokens=64,
    )
    simulated = {one.prompt.request_id: one for one in at_times(prompts, times, spec).requests}
    choices = {}

    async def main(engine, launchers, account):
        for group, parts_of in enumerate(groups):
            generations = []
            for number, parts in enumerate(parts_of):
                before = Counter(account.routed)
                params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
                tokens = [token for part in parts for token in part]
                generations.append(engine.submit(make(params=params, prompt=tokens)))
                (chosen,) = (account.routed - before).elements()
                choices[f"{group}-{number}"] = f"replica {chosen}"
            await asyncio.gather(*map(answer_of, generations))

    play(main, size, router=router(), create=lambda: ThreadLauncher(byte_tokenizer))
    assert choices == {name: one.replica for name, one in simulated.items()}
    assert len(set(choices.values())) == size


# -- figures -------------------------------------------------------------------------------------


def test_figures_of_several_engines_are_added_up():
    one = StepStats.idle(10)
    values = {
        "num_running": 3, "num_waiting": 1, "step_seconds": 2.0, "kv_waste": 0.5,
        "draft_accepted_by_position": (2, 1), "floor_seconds": 1.0,
    }  # fmt: skip
    other = StepStats(**{**one.as_json(), **values})
    total = summed([one, other], 2, 50)
    assert (total.num_running, total.num_waiting, total.num_waiting_tokens) == (3, 3, 50)
    assert total.num_free_blocks == 20 and total.step_seconds == 2.0
    assert total.kv_waste == 0.25 and total.floor_seconds == 1.0
    assert total.draft_accepted_by_position == (2, 1) and total.kv_blocks_stored is None
    assert summed([]) == StepStats.idle()
