from __future__ import annotations

import math

import pytest

from octavo.core.batch import StepOutput
from octavo.core.clock import VirtualClock, WallClock
from octavo.core.executor import FinishedStep
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.executor.hashing import HashExecutor, expected_tokens


class FaultyExecutor(HashExecutor):
    """Raises, or reports errors, because of the requests that it is told to."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.poison: set[str] = set()  # a step with one of these raises
        self.bad_requests: set[str] = set()
        self.num_steps = 0
        self.seen_finished: set[str] = set()

    def submit(self, batch):
        self.num_steps += 1
        poisoned = any(item.request.request_id in self.poison for item in batch.items)
        if poisoned and self.num_steps % 2:  # before it has done anything
            raise RuntimeError("out of luck")
        step = super().submit(batch)
        if poisoned:  # or when all is done
            raise RuntimeError("out of luck")
        self.seen_finished.update(batch.finished_ids)
        errors = {
            item.request.request_id: "NaN"
            for item in batch.items
            if item.request.request_id in self.bad_requests
        }
        tokens = {key: ids for key, ids in step.output.token_ids.items() if key not in errors}
        return FinishedStep(StepOutput(tokens, errors=errors))


@pytest.fixture
def engine(make_engine):
    engine = make_engine()
    blocks = engine.scheduler.block_manager
    engine.executor = FaultyExecutor(blocks.num_blocks, blocks.block_size)
    return engine


def test_an_error_ends_its_own_request_and_no_other(engine, make_request, run):
    good, bad = make_request("good", [1, 2, 3, 4, 5]), make_request("bad", [6, 7, 8, 9, 10])
    engine.executor.bad_requests.add("bad")
    engine.add(good)
    engine.add(bad)
    run(engine)
    assert bad.finish_reason is FinishReason.ERROR and bad.error == "NaN"
    assert good.output_token_ids == expected_tokens(good.prompt_token_ids, 4, 97)


def test_what_a_damaged_step_computed_is_not_cached(engine, make_request, run):
    engine.executor.bad_requests.add("bad")
    engine.add(make_request("bad", [1, 2, 3, 4, 5]))
    run(engine)
    assert engine.scheduler.block_manager.num_cached_blocks == 0


def test_a_request_that_raises_alone_ends_and_the_next_one_works(engine, make_request, run):
    first, second = make_request("first", [1, 2]), make_request("second", [3, 4])
    engine.add(first)
    engine.step()
    engine.executor.poison.add("first")
    step = engine.step()
    assert [update.request for update in step.updates] == [first]
    assert first.finish_reason is FinishReason.ERROR and "out of luck" in first.error
    assert engine.scheduler.block_manager.num_used_blocks == 0
    engine.add(second)
    run(engine)
    assert second.output_token_ids == expected_tokens([3, 4], 4, 97)
    assert "first" in engine.executor.seen_finished


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17, 32])
def test_a_step_that_raises_is_cut_down_to_the_guilty_request(
    make_engine, make_request, run, count
):
    def run_with(poison):
        engine = make_engine(256, 4, max_num_seqs=32)
        engine.executor = FaultyExecutor(256, 4)
        requests = [make_request(f"r{i}", [i, i + 1, i + 2], max_tokens=3) for i in range(count)]
        for request in requests:
            engine.add(request)
        engine.step()
        engine.executor.poison.update(poison)
        run(engine)
        engine.scheduler.block_manager.check_integrity([])
        return engine.executor.num_steps, requests

    undisturbed, _ = run_with([])
    for guilty in {0, count // 2, count - 1}:
        num_steps, requests = run_with([f"r{guilty}"])
        assert num_steps - undisturbed <= 2 * math.ceil(math.log2(count))
        for index, request in enumerate(requests):
            if index == guilty:
                assert request.finish_reason is FinishReason.ERROR
                assert request.num_output_tokens == 1
            else:
                expected = expected_tokens(request.prompt_token_ids, 3, 97)
                assert request.output_token_ids == expected


def test_several_guilty_requests_all_end_alone(make_engine, make_request, run):
    engine = make_engine(256, 4, max_num_seqs=32)
    engine.executor = FaultyExecutor(256, 4)
    engine.executor.poison = {"r1", "r2", "r7"}
    requests = [make_request(f"r{i}", [i, 1]) for i in range(10)]
    for request in requests:
        engine.add(request)
    run(engine)
    failed = {r.request_id for r in requests if r.finish_reason is FinishReason.ERROR}
    assert failed == engine.executor.poison


@pytest.mark.parametrize("guilty", ["leader", "fork-1", "fork-2"])
def test_a_step_with_block_copies_that_raises(make_engine, make_request, guilty):
    """Forks copy a block when they first write to it; then is when they break here."""
    engine = make_engine(64, 4, max_num_seqs=8)
    engine.executor = FaultyExecutor(64, 4)
    prompt = [5, 6, 7, 8, 9, 10]  # ends inside a block
    leader = make_request("leader", prompt)
    forks = [make_request(f"fork-{i}", prompt, fork_of=leader) for i in (1, 2)]
    for request in (leader, *forks):
        engine.add(request)
    while engine.has_unfinished_requests:
        if leader.num_output_tokens == 1:
            engine.executor.poison.add(guilty)
        engine.step()
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running)
    for request in (leader, *forks):
        if request.request_id == guilty:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert request.output_token_ids == expected_tokens(prompt, 4, 97)


def test_an_abort_while_a_step_is_being_cut(make_engine, make_request):
    engine = make_engine(64, 4)
    engine.executor = FaultyExecutor(64, 4)
    requests = [make_request(f"r{i}", [i, 1]) for i in range(4)]
    for request in requests:
        engine.add(request)
    engine.executor.poison = {"r3"}
    engine.step()
    engine.abort("r0")
    engine.abort("r3")
    while engine.has_unfinished_requests:
        engine.step()
    reasons = [request.finish_reason for request in requests]
    assert reasons[0] is FinishReason.ABORT and reasons[1] is reasons[2] is FinishReason.LENGTH
    assert reasons[3] in (FinishReason.ABORT, FinishReason.ERROR)
    engine.scheduler.block_manager.check_integrity([])


def test_an_idle_engine_has_nothing_to_step(engine):
    assert engine.step() is None and not engine.begin_step()


def test_timestamps_follow_the_clock(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.clock = clock = VirtualClock(10.0)
    request = make_request("a", [1], max_tokens=3)
    request.stats.arrival_time = 9.0
    engine.add(request)
    for moment in (11.0, 13.0, 14.0):
        engine.begin_step()
        clock.advance_to(moment)
        engine.finish_step()
    stats = request.stats
    assert (stats.queue_time, stats.ttft, stats.e2e) == (1.0, 2.0, 5.0)
    assert stats.tpot == 1.5 and stats.decode_tps == pytest.approx(2 / 3)
    assert stats.prefill_tps == 1.0 and stats.num_output_tokens == 3


def test_a_leak_shows_when_the_engine_becomes_idle(engine, make_request, run, caplog):
    engine.add(make_request("a", [1, 2]))
    run(engine)
    assert engine.num_invariant_violations == 0
    engine.scheduler.block_manager.free_blocks.popitem(last=False)
    engine.add(make_request("b", [1, 2]))
    while (step := engine.step()) is not None:
        last = step
    assert engine.num_invariant_violations == last.stats.num_invariant_violations == 1
    assert "damaged" in caplog.text


class RoundsExecutor(HashExecutor):
    """Takes all the rounds it may, and remembers them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rounds = []

    def _num_rounds(self, batch):
        self.rounds.append(batch.max_rounds)
        return batch.max_rounds


def rounds_of(engine, run, *requests):
    engine.executor = RoundsExecutor(16, 4)
    for request in requests:
        engine.add(request)
    run(engine)
    for request in requests:
        assert request.output_token_ids == expected_tokens(
            request.prompt_token_ids, request.num_output_tokens, 97
        )
    return engine.executor.rounds


def test_a_lone_request_decodes_several_tokens_a_step(make_engine, make_request, run):
    engine = make_engine(16, 4, max_rounds=4)
    request = make_request("a", [1, 2, 3], params=SamplingParams(max_tokens=12, ignore_eos=True))
    assert rounds_of(engine, run, request) == [1, 4, 4, 3]
    assert request.finish_reason is FinishReason.LENGTH
    # What the rounds computed is published as if it had come token by token.
    blocks = engine.scheduler.block_manager
    assert blocks.num_cached_blocks == (3 + 12 - 1) // 4


def test_two_requests_decode_token_by_token(make_engine, make_request, run):
    engine = make_engine(16, 4, max_rounds=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [make_request(name, [1, 2, 3], params=params) for name in "ab"]
    assert set(rounds_of(engine, run, *requests)) == {1}


def test_a_stop_token_ends_a_request_within_a_step(make_engine, make_request, run):
    stop = expected_tokens([1, 2, 3], 6, 97)[5]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    engine = make_engine(16, 4, max_rounds=4)
    request = make_request("a", [1, 2, 3], params=params)
    assert rounds_of(engine, run, request) == [1, 4, 4]
    assert (request.num_output_tokens, request.stop_reason) == (6, stop)
    assert engine.scheduler.block_manager.num_cached_blocks == (3 + 6 - 1) // 4


def test_stop_strings_are_looked_for_after_every_token(make_engine, make_request, run):
    params = SamplingParams(max_tokens=4, ignore_eos=True, stop=["x"])
    engine = make_engine(16, 4, max_rounds=4)
    assert rounds_of(engine, run, make_request("a", [1, 2], params=params)) == [1] * 4


def test_rounds_end_where_the_context_does(make_engine, make_request, run):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    engine = make_engine(16, 4, max_rounds=8, max_model_len=8)
    assert rounds_of(engine, run, make_request("a", [1, 2, 3], params=params)) == [1, 4]


def test_close_aborts_what_is_left(engine, make_request):
    request = make_request("a", [1, 2])
    engine.add(request)
    engine.begin_step()
    engine.close()
    assert request.finish_reason is FinishReason.ABORT
    assert engine.scheduler.block_manager.num_used_blocks == 0


def test_clocks():
    clock = VirtualClock()
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock.now() == 2.0
    wall = WallClock()
    assert wall.now() <= wall.now()
