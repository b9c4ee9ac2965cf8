from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hash_model import HashExecutor, expected_tokens

import octavo
from octavo.core.batch import StepOutput
from octavo.core.clock import VirtualClock, WallClock
from octavo.core.executor import ExecutorAround, FinishedStep
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams


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
        output = super().submit(batch).result()
        if poisoned:  # or when all is done
            raise RuntimeError("out of luck")
        self.seen_finished.update(batch.finished_ids)
        errors = {
            item.request.request_id: "NaN"
            for item in batch.items
            if item.request.request_id in self.bad_requests
        }
        tokens = {key: ids for key, ids in output.token_ids.items() if key not in errors}
        return FinishedStep(StepOutput(tokens, errors=errors))


@pytest.fixture
def engine(make_engine):
    return make_engine(around=lambda _: FaultyExecutor(32, 4))


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


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_that_was_interrupted_is_run_again(engine, make_request, run, goes_on):
    """Or does no more than to give back the blocks of those who are aborted because of it."""
    request = make_request("r", [1, 2, 3])
    engine.add(request)
    submit = engine.executor.submit

    def interrupt(batch):
        engine.executor.submit = submit
        raise KeyboardInterrupt

    engine.executor.submit = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    if not goes_on:
        engine.abort("r")
    run(engine)
    expected = expected_tokens([1, 2, 3], 4, 97)
    assert request.output_token_ids == (expected if goes_on else [])
    assert engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17, 32])
def test_a_step_that_raises_is_cut_down_to_the_guilty_request(
    make_engine, make_request, run, count
):
    def run_with(poison):
        engine = make_engine(256, 4, max_num_seqs=32, around=lambda _: FaultyExecutor(256, 4))
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
    engine = make_engine(256, 4, max_num_seqs=32, around=lambda _: FaultyExecutor(256, 4))
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
    engine = make_engine(64, 4, max_num_seqs=8, around=lambda _: FaultyExecutor(64, 4))
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
    engine = make_engine(64, 4, around=lambda _: FaultyExecutor(64, 4))
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


@pytest.mark.parametrize("poison", [set(), {"alone#1"}, {"r1"}])
def test_what_runs_alone_has_no_company_but_its_samples(make_engine, make_request, run, poison):
    """And the rest go on beside it as ever: the same tokens, in one step for each of its own."""
    executor = FaultyExecutor(64, 4)
    engine = make_engine(64, 4, max_num_seqs=8, around=lambda _: executor)
    executor.poison = poison
    companies, submit = [], executor.submit

    def watched(batch):
        companies.append({item.request.request_id.split("#")[0] for item in batch.items})
        return submit(batch)

    executor.submit = watched
    prompt = [5, 6, 7, 8, 9, 10]  # ends inside a block, which its samples copy
    leader = make_request("alone", prompt, isolated=True)
    samples = [leader] + [
        make_request(f"alone#{i}", prompt, fork_of=leader, isolated=True) for i in (1, 2)
    ]
    others = [make_request(f"r{i}", [i, i + 1, i + 2]) for i in range(3)]
    for request in (others[0], *samples, *others[1:]):
        engine.add(request)
    run(engine)
    for request in (*samples, *others):
        if request.request_id in poison:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 4, 97)
    assert {"alone"} in companies
    assert all(company == {"alone"} for company in companies if "alone" in company)
    if not poison:
        first = companies.index({"alone"})
        assert companies[first : first + 6].count({"alone"}) == 3
        assert len(companies) <= 2 * 5  # as many again as without company


def test_beside_the_step_of_what_runs_alone_there_is_no_other(make_engine, make_request, run):
    engine = make_engine(64, 4, depth=2)
    beside, submit = [], engine.executor.submit

    def watched(batch):
        if any(item.request.isolated for item in batch.items):
            beside.append(len(engine._submitted))
        return submit(batch)

    engine.executor.submit = watched
    requests = [make_request(f"r{i}", [i, 1], isolated=i == 2) for i in range(4)]
    for request in requests[:2]:
        engine.add(request)
    engine.step()
    for request in requests[2:]:
        engine.add(request)
    run(engine)
    assert beside == [0] * 4
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 4, 97)


def test_an_abort_of_what_runs_alone(make_engine, make_request, run):
    engine = make_engine()
    requests = [make_request(f"r{i}", [i, 1], isolated=i == 1) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort("r1")
    run(engine)
    assert [request.num_output_tokens for request in requests] == [4, 0, 4]
    engine.add(make_request("next", [1, 2]))
    engine.add(make_request("beside", [1, 2]))
    assert engine.step().batch.num_seqs == 2  # it is forgotten
    run(engine)


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


def test_who_has_left_is_named_in_the_next_batch_that_is_run(make_engine, make_request):
    """An idle step runs none, and must not take the names along: rows of tables would leak."""
    engine = make_engine()
    engine.add(make_request("a", [1, 2]))
    engine.step()
    engine.abort("a")
    assert engine.step() is None and engine.step() is None
    engine.add(make_request("b", [1, 2]))
    assert engine.step().batch.finished_ids == ("a",)


def test_who_preempted_itself_is_named_in_the_next_batch(make_engine, make_request):
    """It was the last in order, and nothing else could run in that step."""
    engine = make_engine(
        5, 2, depth=2, prefix_caching=False, runs_ahead=False, max_num_batched_tokens=1
    )
    for name in ("first", "last"):
        engine.add(make_request(name, [1] * 3, max_tokens=6))
    batches = []
    while not engine.scheduler.num_preemptions:
        batches.append(engine.step().batch)
    assert not any(batch.preempted_ids for batch in batches)  # so it was a step that was not run
    while "last" not in batches[-1].finished_ids:
        batches.append(engine.step().batch)
    assert not any(item.request.request_id == "last" for item in batches[-1].items)


def test_tokens_of_a_step_that_raised_count_once(make_engine, make_request):
    def count(poison) -> tuple[int, int, int]:
        engine = make_engine(
            7, 2, max_num_seqs=8, prefix_caching=False, around=lambda _: FaultyExecutor(7, 2)
        )
        for index in range(3):
            engine.add(make_request(f"r{index}", [index] * 3, max_tokens=6))
        steps = []
        while (step := engine.step()) is not None:
            steps.append(step.stats)
            engine.executor.poison = poison if len(steps) in (1, 4) else set()
            if step.stats.num_seqs == 0:
                assert step.batch.items == () and step.stats.num_tokens == 0
        assert sum(stats.num_preempted for stats in steps) == steps[-1].num_preemptions > 0
        return sum(s.num_tokens for s in steps), sum(s.num_seqs for s in steps), len(steps)

    tokens, seqs, num_steps = count(set())
    again = count({"r1"})
    assert again[2] > num_steps
    assert again[:2] == (tokens, seqs)


# -- the audit -------------------------------------------------------------------------------


def test_a_leak_shows_with_the_last_token(engine, make_request, run, caplog):
    engine.add(make_request("a", [1, 2]))
    run(engine)
    assert engine.num_invariant_violations == 0
    engine.scheduler.block_manager.free_blocks.popitem(last=False)
    engine.add(make_request("b", [1, 2]))
    while (step := engine.step()) is not None:
        last = step
    assert last.updates[0].new_token_ids  # which is good, and comes all the same
    assert engine.num_invariant_violations == last.stats.num_invariant_violations == 1
    assert "1 blocks are used by no request" in caplog.text


def test_counts_that_cannot_be_show_at_once(engine, make_request):
    engine.scheduler.block_manager.num_cached_blocks = -1
    engine.add(make_request("a", [1, 2]))
    assert engine.step().stats.num_invariant_violations == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("reference", "references without a request, block 9000 first"),
        ("lost", "1 blocks are lost, block 9000 first"),
        ("cached", "1 blocks are cached, not 2"),
    ],
)
def test_an_idle_pool_is_looked_over_in_parts(
    make_engine, make_request, run, caplog, damage, words
):
    engine = make_engine(10_000, 4)
    engine.add(make_request("a", [1, 2]))
    assert not engine.audit()  # not while there is something to do
    run(engine)
    blocks = engine.scheduler.block_manager
    if damage == "reference":
        blocks.ref_counts[9_000] = 1
    elif damage == "lost":
        del blocks.free_blocks[9_000]
        blocks.free_blocks[-1] = None
    else:
        blocks.num_cached_blocks += 1
    assert engine.audit() and engine.audit() and engine.num_invariant_violations == 0
    assert not engine.audit() and engine.num_invariant_violations == 1
    assert words in caplog.text
    assert not engine.audit() and engine.num_invariant_violations == 1  # nothing new since


def test_the_audit_begins_anew_when_the_pool_was_used(make_engine, make_request, run):
    engine = make_engine(10_000, 4)
    for name in "ab":
        engine.add(make_request(name, [1, 2]))
        run(engine)
        assert [engine.audit() for _ in range(4)] == [True, True, False, False]
    assert engine.num_invariant_violations == 0


def test_the_audit_needs_no_asserts():
    """Under ``python -O`` there are none."""
    code = """
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler, SchedulerConfig
from hash_model import HashExecutor
from octavo.base.errors import EngineError

blocks = BlockManager(8, 4)
engine = Engine(Scheduler(SchedulerConfig(), blocks), HashExecutor(8, 4))
blocks.ref_counts[3] = 2
engine.audit()
try:
    engine.check_integrity()
except EngineError as error:
    print(engine.num_invariant_violations, error)
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    words = "reference counts and block tables disagree"
    assert result.stdout == f"1 the block pool is damaged: {words}\n"


class RoundsExecutor(HashExecutor):
    """Takes all the decode steps it may, and remembers them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.num_steps = []

    def _num_multi_steps(self, item):
        self.num_steps.append(item.num_sampled)
        return item.num_sampled


def steps_of(engine, run, *requests):
    engine.executor = RoundsExecutor(16, 4)
    for request in requests:
        engine.add(request)
    run(engine)
    for request in requests:
        assert request.output_token_ids == expected_tokens(
            request.prompt_token_ids, request.num_output_tokens, 97
        )
    return engine.executor.num_steps


def test_a_lone_request_decodes_several_tokens_a_step(make_engine, make_request, run):
    engine = make_engine(16, 4, max_multi_steps=4)
    request = make_request("a", [1, 2, 3], params=SamplingParams(max_tokens=12, ignore_eos=True))
    assert steps_of(engine, run, request) == [1, 4, 4, 3]
    assert request.finish_reason is FinishReason.LENGTH
    # What the further steps computed is published as if it had come token by token.
    blocks = engine.scheduler.block_manager
    assert blocks.num_cached_blocks == (3 + 12 - 1) // 4


def test_two_requests_decode_token_by_token(make_engine, make_request, run):
    engine = make_engine(16, 4, max_multi_steps=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [make_request(name, [1, 2, 3], params=params) for name in "ab"]
    assert set(steps_of(engine, run, *requests)) == {1}


def test_a_stop_token_ends_a_request_within_a_step(make_engine, make_request, run):
    stop = expected_tokens([1, 2, 3], 6, 97)[5]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    engine = make_engine(16, 4, max_multi_steps=4)
    request = make_request("a", [1, 2, 3], params=params)
    assert steps_of(engine, run, request) == [1, 4, 4]
    assert (request.num_output_tokens, request.stop_reason) == (6, stop)
    assert engine.scheduler.block_manager.num_cached_blocks == (3 + 6 - 1) // 4


def test_multi_step_ends_where_the_context_does(make_engine, make_request, run):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    engine = make_engine(16, 4, max_multi_steps=8, max_model_len=8)
    assert steps_of(engine, run, make_request("a", [1, 2, 3], params=params)) == [1, 4]


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


# -- what steps took -------------------------------------------------------------------------------


class Meter:
    """Notes what it is shown."""

    def __init__(self):
        self.steps = []

    def measure(self, batch, num_multi_steps, seconds):
        self.steps.append((batch.num_tokens, num_multi_steps, seconds))

    @property
    def figures(self):
        return {"floor_seconds": 0.5 * len(self.steps)}


class TimedExecutor(ExecutorAround):
    """Steps take a quarter of a second, on a clock of its own."""

    def __init__(self, executor, clock):
        super().__init__(executor)
        self._clock = clock

    def submit(self, batch):
        self._clock.advance_to(self._clock.now() + 0.25)
        return super().submit(batch)


def metered(make_engine, **config):
    """An engine over a `TimedExecutor`, and its meter."""
    clock, meter = VirtualClock(), Meter()
    around = partial(TimedExecutor, clock=clock)
    return make_engine(around=around, clock=clock, meter=meter, **config), meter


def test_steps_are_timed_and_shown_to_a_meter(make_engine, make_request):
    assert make_engine().stats().floor_seconds is None
    engine, meter = metered(make_engine, max_num_batched_tokens=8)
    assert engine.stats().floor_seconds == 0.0
    engine.add(make_request("a", list(range(12)), max_tokens=2))
    stats = [engine.step().stats for _ in range(3)]
    assert meter.steps == [(8, 1, 0.25), (4, 1, 0.25), (1, 1, 0.25)]
    assert [each.seconds for each in stats] == [0.25] * 3
    assert [each.step_seconds for each in stats] == [0.25, 0.5, 0.75]
    assert [each.floor_seconds for each in stats] == [0.5, 1.0, 1.5]
    assert [each.num_prompt_tokens for each in stats] == [8, 4, 0]
    assert [each.num_due_tokens for each in stats] == [3, 0, 0]
    assert engine.stats().seconds == 0.0  # between two steps


def test_a_meter_hears_how_many_steps_there_were(make_engine, make_request):
    engine, meter = metered(make_engine, max_multi_steps=4)
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    brought = []
    while engine.has_unfinished_requests:
        (update,) = engine.step().updates
        brought.append(len(update.new_token_ids))
    assert [num_steps for _, num_steps, _ in meter.steps] == brought
    assert sum(brought) == 6 and max(brought) > 1


def test_an_engine_gets_its_parts_when_it_is_made():
    """So that who reads where it is made knows what it runs."""
    for file in Path(octavo.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert is_own or node.attr not in ("executor", "meter"), (file, node.lineno)


def test_a_step_that_raised_took_no_time(make_engine, make_request):
    meter = Meter()
    engine = make_engine(around=lambda _: FaultyExecutor(32, 4), meter=meter)
    engine.add(make_request("a", [1, 2]))
    engine.executor.poison = {"a"}
    assert engine.step().stats.seconds == 0.0 and not meter.steps
