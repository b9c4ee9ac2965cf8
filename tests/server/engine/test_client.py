"""The engine as HTTP sees it: here on the hash model, in a thread that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from hash_model import expected_tokens
from rank_models import llama_8b
from thread_engine import LATE_POISON, POISON, RAISE, VOCAB, ThreadLauncher

from octavo.base.errors import (
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
)
from octavo.core.limits import QueueLimits
from octavo.core.sampling_params import SamplingParams
from octavo.cost.find_device import find_device
from octavo.cost.step_facts import StepFacts
from octavo.server.engine.client import ProcessEngine
from octavo.server.engine.generation import (
    EngineObserver,
    EngineState,
    GenerationRequest,
    RequestRules,
)
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.unread_output import UnreadOutputMemory


class Account(EngineObserver):
    """Everything that was told."""

    def __init__(self):
        self.submitted, self.finished, self.num_tokens, self.states = [], {}, 0, []
        self.rejected = []

    def on_rejected(self, reason):
        self.rejected.append(reason)

    def on_submitted(self, generation):
        self.submitted.append(generation.request.request_id)

    def on_finished(self, generation, reason):
        assert generation.request.request_id not in self.finished
        self.finished[generation.request.request_id] = reason

    def on_tokens(self, generation, num_tokens, gap):
        assert gap is None or gap >= 0
        self.num_tokens += num_tokens

    def on_engine_state(self, state, detail):
        self.states.append(state)


@pytest.fixture
def launcher(byte_tokenizer):
    return ThreadLauncher(byte_tokenizer)


def run(launcher, main, **options):
    """Run ``main(engine, account)`` with a started engine; nothing may be left behind."""

    async def with_engine():
        account = Account()
        engine = ProcessEngine(launcher, observer=account, **options)
        await engine.start()
        try:
            await asyncio.wait_for(main(engine, account), 20)
        finally:
            await engine.stop()
        assert sorted(account.submitted) == sorted(account.finished)
        assert engine.num_unfinished == 0

    asyncio.run(with_engine())


_ids = iter(range(10**9))


def make(prompt, max_tokens=6, **fields):
    params = fields.pop("params", None) or SamplingParams(
        max_tokens=max_tokens, seed=1, ignore_eos=True
    )
    return GenerationRequest(f"r{next(_ids)}", prompt, params, time.monotonic(), **fields)


async def stream(generation):
    """Token ids as they come; the error in place of the rest."""
    ids = []
    try:
        async with generation:
            async for deltas in generation:
                for delta in deltas:
                    ids += delta.token_ids
    except Exception as error:
        ids.append(error)
    return ids


async def until(condition):
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


def used_blocks(launcher):
    return launcher.current.text_engine.engine.scheduler.block_manager.num_used_blocks


def test_streams_and_whole_answers_agree_with_the_model(launcher):
    async def main(engine, account):
        prompts = [[i, i + 1, i + 2] for i in range(20)]
        streams = [stream(engine.submit(make(prompt, streams=True))) for prompt in prompts]
        wholes = [engine.submit(make(prompt)).collect() for prompt in prompts]
        for prompt, ids in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert ids == expected_tokens(prompt, 6, VOCAB)
        for prompt, (whole,) in zip(prompts, await asyncio.gather(*wholes), strict=True):
            assert whole.token_ids == expected_tokens(prompt, 6, VOCAB)
            assert whole.text == launcher.tokenizer.decode(whole.token_ids)
            assert whole.finish_reason == "length"
        assert account.num_tokens == 2 * 20 * 6
        assert set(account.finished.values()) == {"length"}

    run(launcher, main)


def test_samples_share_a_generation_and_have_stats(launcher):
    async def main(engine, account):
        params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
        generation = engine.submit(make([1, 2, 3, 4, 5], params=params))
        completions = await generation.collect()
        assert [one.index for one in completions] == [0, 1, 2]
        stats = generation.stats
        assert stats.num_output_tokens == 15
        assert 0 <= stats.queue_time <= stats.ttft <= stats.e2e
        assert stats.e2e == pytest.approx(stats.ttft + stats.decode_time)

    run(launcher, main)


def test_closing_frees_the_blocks_within_a_step(launcher):
    async def main(engine, account):
        launcher.current.executor.delay = 0.02
        request = make([1, 2, 3], 60, streams=True)
        async with engine.submit(request) as generation:
            await anext(generation)
            assert used_blocks(launcher)
        assert account.finished == {request.request_id: "abort"}
        step = launcher.current.text_engine.engine.scheduler.num_steps
        await until(lambda: not used_blocks(launcher))
        assert launcher.current.text_engine.engine.scheduler.num_steps <= step + 2
        generation.close()

    run(launcher, main)


def test_a_request_that_raises_ends_alone(launcher):
    async def main(engine, account):
        good = [engine.submit(make([i, i])) for i in range(6)]
        bad = engine.submit(make([RAISE, 1]))
        (whole,) = await bad.collect()
        assert whole.finish_reason == "error" and "as asked" in whole.error
        for i, generation in enumerate(good):
            (whole,) = await generation.collect()
            assert whole.token_ids == expected_tokens([i, i], 6, VOCAB)
        assert len(launcher.engines) == 1

    run(launcher, main)


def test_an_engine_that_fails_everything_is_replaced(launcher):
    """A request can be bad; but when the engine's own probe fails too, it is the engine."""

    async def main(engine, account):
        def broken(batch):
            raise RuntimeError("the device has fallen over")

        launcher.current.executor.submit = broken
        failed = [await engine.submit(make([i, i])).collect() for i in range(8)]
        assert all(whole.finish_reason == "error" for (whole,) in failed)
        await until(lambda: len(launcher.engines) == 2 and engine.state is EngineState.READY)
        (whole,) = await engine.submit(make([1, 2])).collect()
        assert whole.token_ids == expected_tokens([1, 2], 6, VOCAB)

    run(launcher, main)


def test_many_bad_requests_are_no_reason_to_begin_anew(launcher):
    async def main(engine, account):
        for i in range(30):
            await engine.submit(make([RAISE, i])).collect()
        assert len(launcher.engines) == 1

    run(launcher, main)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([], 6, InvalidRequestError),
        ([1] * 60, 6, PromptTooLongError),
        ([VOCAB], 6, InvalidRequestError),
        ([True], 6, InvalidRequestError),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(launcher, prompt, max_tokens, error):
    async def main(engine, account):
        with pytest.raises(error):
            engine.submit(make(prompt, max_tokens))
        assert not account.submitted

    run(launcher, main)


def test_the_queue_is_bounded_by_requests_and_by_tokens(launcher):
    async def main(engine, account):
        launcher.current.is_hanging = True
        accepted = [engine.submit(make([1, 2, 3])) for _ in range(4)]
        with pytest.raises(QueueFullError) as refusal:
            engine.check_capacity()
        assert refusal.value.retry_after >= 1
        with pytest.raises(QueueFullError):
            engine.submit(make([1]))
        for generation in accepted[1:]:
            generation.close()
        engine.check_capacity()
        with pytest.raises(QueueFullError):  # its samples come together
            engine.submit(make([1], params=SamplingParams(n=4)))
        engine.submit(make([1] * 30)).close()
        with pytest.raises(QueueFullError, match="tokens"):
            engine.submit(make([1] * 50))
        with pytest.raises(QueueFullError, match="tokens"):  # of its answer
            engine.submit(make([1], 55))
        launcher.current.is_hanging = False
        assert await accepted[0].collect()

    run(launcher, main, limits=QueueLimits(4, 60))


def test_who_fills_the_queue_leaves_their_share_to_others(launcher):
    async def main(engine, account):
        launcher.current.is_hanging = True
        for _ in range(4):
            engine.submit(make([1], tenant="flood"))
        with pytest.raises(QueueFullError):
            engine.check_capacity("flood")
        for _ in range(2):
            engine.check_capacity("other")
            engine.submit(make([1], tenant="other"))
        with pytest.raises(QueueFullError):
            engine.submit(make([1], tenant="other"))
        launcher.current.is_hanging = False

    run(launcher, main, limits=QueueLimits(4, None))


def test_all_work_that_is_not_over_counts(launcher):
    async def main(engine, account):
        launcher.current.is_hanging = True
        first = engine.submit(make([1] * 4, params=SamplingParams(n=2, max_tokens=11)))
        with pytest.raises(QueueFullError, match="30 tokens are under way"):
            engine.submit(make([1] * 5))
        assert account.rejected == ["work"]
        with pytest.raises(InvalidRequestError, match="may be under way"):
            engine.check_size(1, 41)
        launcher.current.is_hanging = False
        await first.collect()
        assert await engine.submit(make([1] * 5)).collect()

    run(launcher, main, max_work=40)


def test_a_server_has_rules_for_what_its_engine_could_do(launcher):
    def asking(max_tokens, **fields):
        return make([1, 2], params=SamplingParams(max_tokens=max_tokens, seed=1, **fields))

    async def strict(engine, account):
        with pytest.raises(InvalidRequestError, match="--allow-window"):
            engine.submit(asking(5, window=4))
        with pytest.raises(InvalidRequestError, match="more than the 20"):
            engine.submit(asking(21))
        assert await engine.submit(asking(20)).collect()

    async def lenient(engine, account):
        with pytest.raises(InvalidRequestError, match="more than the 65536"):
            engine.submit(asking(2_000_000_000, window=4))
        assert await engine.submit(asking(100, window=4, ignore_eos=True)).collect()

    run(launcher, strict, rules=RequestRules(allow_window=False, max_output_tokens=20))
    run(launcher, lenient, rules=RequestRules(allow_window=True))


def test_what_is_not_read_is_bounded_over_all_answers(launcher):
    """The one that holds the most is given up; the others come whole."""
    unread = UnreadOutputMemory(3000)

    async def main(engine, account):
        large = engine.submit(make([1], params=SamplingParams(n=2, max_tokens=50, logprobs=5)))
        small = [engine.submit(make([number])) for number in range(2, 5)]
        with pytest.raises(QueueFullError, match="read a stream"):
            await large.collect()
        for generation in small:
            (completion,) = await generation.collect()
            assert len(completion.token_ids) == 6
        for generation in (large, *small):
            generation.close()
        assert unread.num_bytes == 0 and engine.num_unfinished == 0

    run(launcher, main, unread=unread)


STEP_FACTS = StepFacts(llama_8b(), find_device("epyc-genoa")[0])


def test_steps_are_metered_once_it_is_known_against_what(launcher):
    """In each engine, one after the other."""

    async def main(engine, account):
        await engine.submit(make([1, 2, 3])).collect()
        assert engine.stats.floor_seconds is None and engine.stats.step_seconds > 0
        engine.set_step_facts(STEP_FACTS)
        await engine.submit(make([4, 5, 6])).collect()
        stats = engine.stats
        assert stats.floor_seconds > 0 and stats.predicted_seconds > stats.floor_seconds
        assert stats.num_memory_bound is not None
        launcher.current.kill()
        await until(lambda: engine.num_restarts == 1 and engine.state is EngineState.READY)
        await engine.submit(make([7, 8, 9])).collect()
        assert engine.stats.floor_seconds == stats.floor_seconds  # the same work, begun anew

    run(launcher, main)


def test_who_would_wait_too_long_is_refused(launcher):
    async def main(engine, account):
        assert await engine.submit(make([1, 2, 3])).collect()  # nothing is known yet
        engine.set_step_facts(STEP_FACTS)
        launcher.current.is_hanging = True
        accepted, refused = [], 0
        for number in range(30):
            try:
                accepted.append(engine.submit(make([number] * 40)))
            except QueueFullError as error:
                assert "predicted" in str(error) and error.retry_after > 0
                refused += 1
        assert accepted and refused and account.rejected == ["predicted_ttft"] * refused
        predicted = [generation.stats.predicted_ttft for generation in accepted]
        assert predicted == sorted(predicted) and predicted[0] < predicted[-1] <= 2.0
        launcher.current.is_hanging = False
        for generation in accepted:
            assert await generation.collect()

    run(launcher, main, ttft_admission=TTFTAdmission(2.0))


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(5, 5), (1, 41), (5, 41)])
def test_what_could_never_wait_is_an_error_of_the_request(launcher, num_requests, num_tokens):
    """Not "try again later", which it would be told for ever."""

    async def main(engine, account):
        engine.check_size(4, 40)
        with pytest.raises(InvalidRequestError, match="at once"):
            engine.check_size(num_requests, num_tokens)

    run(launcher, main, limits=QueueLimits(4, 40))


@pytest.mark.timing
def test_deadlines_hold_in_the_queue_and_in_the_run(launcher):
    async def main(engine, account):
        launcher.current.executor.delay = 0.02
        begun = time.monotonic()
        await engine.submit(make([8, 8], 10)).collect()
        now = time.monotonic()
        ten_steps = now - begun
        running_until = now + 0.2
        running = engine.submit(make([1, 2], 60, deadline=running_until))
        await until(lambda: used_blocks(launcher))
        others = [engine.submit(make([i, 3], 60)) for i in range(7)]
        queued = engine.submit(make([9, 9], 60, deadline=now + 0.1))
        with pytest.raises(DeadlineError, match="in the queue"):
            await queued.collect()
        with pytest.raises(DeadlineError, match="while it ran"):
            await running.collect()
        assert time.monotonic() < running_until + ten_steps  # a step that has begun is finished
        for generation in others:
            generation.close()
        await until(lambda: not used_blocks(launcher))
        assert sorted(account.finished.values())[-2:] == ["timeout", "timeout"]

    run(launcher, main)


def test_a_deadline_that_has_passed_is_missed_however_quick_the_answer(launcher):
    async def main(engine, account):
        for _ in range(20):
            generation = engine.submit(make([1], 1, deadline=time.monotonic() - 1e-9))
            time.sleep(0.005)  # the answer is there before the loop turns
            with pytest.raises(DeadlineError):
                await generation.collect()

    run(launcher, main)


def test_a_dead_engine_is_replaced_and_nothing_is_lost(launcher):
    async def main(engine, account):
        launcher.current.executor.delay = 0.01
        begun = [
            asyncio.create_task(stream(engine.submit(make([i, 7], 50, streams=True))))
            for i in range(3)
        ]
        unseen = [engine.submit(make([i, 8], 30)) for i in range(3)]
        waiting = [engine.submit(make([i, 9], 4)) for i in range(8)]
        await until(lambda: used_blocks(launcher) > 6)
        await asyncio.sleep(0.1)
        launcher.current.kill()
        await until(lambda: EngineState.RESTARTING in account.states)
        meanwhile = engine.submit(make([5, 5], 4))
        for ids in await asyncio.gather(*begun):
            *some, error = ids
            assert some and isinstance(error, EngineError) and "restarted" in str(error)
        for number, generations, count in ((8, unseen, 30), (9, waiting, 4)):
            for i, generation in enumerate(generations):
                (whole,) = await generation.collect()
                assert whole.token_ids == expected_tokens([i, number], count, VOCAB)
        assert (await meanwhile.collect())[0].token_ids == expected_tokens([5, 5], 4, VOCAB)
        assert account.states == [
            EngineState.READY,
            EngineState.RESTARTING,
            EngineState.READY,
        ]
        assert engine.num_restarts == 1

    run(launcher, main)


@pytest.mark.parametrize("token", [POISON, LATE_POISON])
def test_a_query_of_death_kills_twice_at_most(launcher, token):
    async def main(engine, account):
        good = [engine.submit(make([i, 7], 20)) for i in range(5)]
        deadly = engine.submit(make([token, 1], 20))
        with pytest.raises(QuarantinedError):
            await deadly.collect()
        for i, generation in enumerate(good):
            (whole,) = await generation.collect()
            assert whole.token_ids == expected_tokens([i, 7], 20, VOCAB)
        for _ in range(3):  # the client's library tries again
            with pytest.raises(QuarantinedError):
                engine.submit(make([token, 1], 20))
        assert (await engine.submit(make([3, 3])).collect())[0].finish_reason == "length"
        assert len(launcher.engines) == 3

    run(launcher, main)


def test_a_stream_that_kills_is_quarantined_after_two_engines(launcher):
    async def main(engine, account):
        for _ in range(2):
            ids = await stream(engine.submit(make([LATE_POISON], 20, streams=True)))
            assert len(ids) == 4 and "restarted" in str(ids[-1])
            await until(lambda: engine.state is EngineState.READY)
        with pytest.raises(QuarantinedError):
            engine.submit(make([LATE_POISON], 20, streams=True))
        assert len(launcher.engines) == 3

    run(launcher, main)


def test_a_hanging_engine_is_noticed(launcher):
    async def main(engine, account):
        launcher.current.is_hanging = True
        generation = engine.submit(make([1, 2]))
        await until(lambda: len(launcher.engines) == 2)
        assert (await generation.collect())[0].token_ids == expected_tokens([1, 2], 6, VOCAB)

    run(launcher, main, engine_timeout=0.2)


def test_what_an_idle_engine_finds_out_of_itself_is_told(launcher):
    """Damage that an audit finds when nothing runs waits for no request."""

    async def main(engine, account):
        launcher.current.text_engine.engine.num_invariant_violations = 3
        await until(lambda: engine.stats.num_invariant_violations == 3)

    run(launcher, main, engine_timeout=0.4)


def test_an_engine_that_dies_by_itself_is_given_up(launcher, monkeypatch):
    monkeypatch.setattr("octavo.server.engine.supervisor._RESTART_PAUSES", (0.0,) * 5)

    async def main(engine, account):
        waiting = engine.submit(make([1] * 3))
        await waiting.collect()
        launcher.failure = {"kind": "ModelFileError", "message": "the file is gone"}
        launcher.current.kill()
        await asyncio.wait_for(engine.wait_until_given_up(), 5)
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineUnavailableError):
            engine.check_capacity()

    run(launcher, main)


def test_what_keeps_it_from_starting_is_said(launcher):
    launcher.failure = {"kind": "ModelNotFoundError", "message": "no such model"}

    async def main():
        engine = ProcessEngine(launcher)
        with pytest.raises(EngineUnavailableError, match="being loaded"):
            engine.submit(make([1]))
        with pytest.raises(ModelNotFoundError, match="no such model"):
            await engine.start()
        await engine.stop()

    asyncio.run(main())


def test_stopping_tells_everybody(launcher):
    async def main(engine, account):
        launcher.current.is_hanging = True
        generations = [engine.submit(make([i, 1])) for i in range(4)]
        launcher.current.is_hanging = False
        await engine.stop()
        for generation in generations:
            with pytest.raises(EngineUnavailableError, match="stopping"):
                await generation.collect()
        with pytest.raises(EngineUnavailableError, match="stopping"):
            engine.submit(make([1]))

    run(launcher, main)


def test_a_thousand_random_aborts_lose_and_mix_nothing(launcher):
    async def client(engine, rng, number):
        prompt = [number % 90, number // 90 % 90, *(rng.randrange(90) for _ in range(3))]
        count = rng.randint(1, 12)
        streams = rng.random() < 0.5
        generation = engine.submit(make(prompt, count, streams=streams))
        answer = stream(generation) if streams else generation.collect()
        task = asyncio.create_task(answer)
        if rng.random() < 0.6:
            await asyncio.sleep(rng.random() * 0.05)
            generation.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return
        result = await task
        ids = result if streams else result[0].token_ids
        assert ids == expected_tokens(prompt, count, VOCAB)

    async def main(engine, account):
        rng = random.Random(0)
        launcher.current.executor.delay = 0.0
        for start in range(0, 1000, 50):
            await asyncio.gather(*(client(engine, rng, start + i) for i in range(50)))
        await until(lambda: not used_blocks(launcher))
        blocks = launcher.current.text_engine.engine.scheduler.block_manager
        await until(lambda: not launcher.current.text_engine.has_unfinished_requests)
        blocks.check_integrity([])
        assert len(account.finished) == 1000

    run(launcher, main)
