"""Steps that hold several future tokens: multi-step decoding, drafts, and steps that overlap."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
from faults import FaultyScheduler, UnreliableExecutor, every
from hash_model import expected_tokens

from octavo.core.batch import Draft
from octavo.core.lookahead import MULTI_STEP_SECONDS, multi_steps_in_time
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.executor.faulty import FaultyExecutor

PROMPT = [1, 2, 3, 4, 5]


def right(prompt, position, count):
    num_output = position - len(prompt)
    return expected_tokens(prompt, num_output + count, 97)[num_output:]


def answer(request):
    return expected_tokens(request.prompt_token_ids, request.params.max_tokens, 97)


# -- drafts ----------------------------------------------------------------------------------


def test_a_draft_is_a_tree_whose_siblings_differ():
    tree = Draft((7, 8, 3, 9), (-1, 0, 0, 1))
    assert tree.depths() == [0, 1, 1, 2]
    assert tree.path([7, 8, 9, 1]) == [0, 1, 3] and tree.path([7, 3, 9]) == [0, 2]
    assert tree.path([8]) == []
    assert tree.first(3) == Draft((7, 8, 3), (-1, 0, 0)) and tree.first(9) is tree
    assert Draft.chain([4, 4, 4]) == Draft((4, 4, 4), (-1, 0, 1))
    for tokens, parents in (((1,), (0,)), ((1, 2), (1, -1)), ((1,), (-2,)), ((1, 2), (-1,))):
        with pytest.raises(ValueError, match="parents"):
            Draft(tokens, parents)
    with pytest.raises(ValueError, match="differ"):
        Draft((5, 5), (-1, -1))


def test_a_right_draft_saves_steps(make_engine, make_request):
    engine = make_engine(propose=lambda prompt, at: Draft.chain(right(prompt, at, 3)))
    request = make_request("a", PROMPT, max_tokens=9)
    engine.add(request)
    steps = []
    while (step := engine.step()) is not None:
        (item,) = step.batch.items
        steps.append((item.start, item.num_tokens, item.num_sampled))
    assert request.output_token_ids == answer(request)
    # 1 of the prompt, 4 and 4. Of the last ones, the bonus token is the one that ends it.
    assert steps == [(0, 5, 1), (5, 4, 4), (9, 4, 4)]
    scheduler = engine.scheduler
    assert (scheduler.drafts.num_tokens, scheduler.drafts.num_accepted) == (6, 6)
    assert step is None and scheduler.block_manager.num_cached_blocks == (5 + 9 - 1) // 4


def test_a_wrong_draft_gives_back_its_tokens_and_slots(make_engine, make_request):
    engine = make_engine(block_size=2, propose=lambda prompt, at: Draft.chain([96, 95, 94, 93]))
    request = make_request("a", PROMPT, max_tokens=8)
    engine.add(request)
    engine.step()
    while not request.is_finished:
        assert engine.begin_step()
        held = len(request.block_ids)
        step = engine.finish_step()
        assert len(step.updates[0].new_token_ids) == 1
        assert step.stats.num_tokens == 1  # rejected draft tokens do not count
        if not request.is_finished:
            num_known = len(request.token_ids)
            assert len(request.block_ids) == -(-num_known // 2) <= held
            assert request.num_computed_tokens == num_known - 1
    assert request.output_token_ids == answer(request)
    scheduler = engine.scheduler
    assert scheduler.drafts.num_tokens > 10 and scheduler.drafts.num_accepted == 0
    assert scheduler.block_manager.num_cached_blocks == (5 + 8 - 1) // 2


def test_of_a_tree_the_right_path_is_taken(make_engine, make_request, run):
    """Which does not lie where the sequence goes on: its KV has to move."""

    def propose(prompt, position):
        first, second = right(prompt, position, 2)
        wrong = (first + 1) % 97
        return Draft((wrong, first, wrong, second), (-1, -1, 0, 1))

    engine = make_engine(block_size=2, propose=propose)
    request = make_request("a", PROMPT, max_tokens=13)
    engine.add(request)
    run(engine)
    assert request.output_token_ids == answer(request)
    assert engine.scheduler.drafts.num_accepted >= 2 * 3
    again = make_request("b", PROMPT + request.output_token_ids[:-1], max_tokens=3)
    engine.add(again)
    assert engine.step().batch.items[0].start > 12  # from the prefix cache
    run(engine)
    assert again.output_token_ids == answer(again)


def test_drafts_take_what_is_left_of_budget_and_blocks(make_engine, make_request, run):
    engine = make_engine(
        max_num_batched_tokens=6, propose=lambda prompt, at: Draft.chain(right(prompt, at, 5))
    )
    requests = [make_request(name, [index, 7], max_tokens=20) for index, name in enumerate("abc")]
    for request in requests:
        engine.add(request)
    engine.step()
    step = engine.step()
    assert [item.num_tokens for item in step.batch.items] == [4, 1, 1]
    run(engine)
    assert all(request.output_token_ids == answer(request) for request in requests)

    tight = make_engine(2, 4, propose=lambda prompt, at: Draft.chain(right(prompt, at, 5)))
    request = make_request("a", [1, 2], max_tokens=7)
    tight.add(request)
    assert run(tight) == [request] and request.num_preemptions == 0
    assert request.output_token_ids == answer(request)


def test_a_request_says_how_many_tokens_may_be_drafted(make_engine, make_request, run):
    for speculative, most in (
        ({"enabled": False}, 1),
        ({"num_speculative_tokens": 0}, 1),
        ({"num_speculative_tokens": 2}, 3),
        ({}, 6),
    ):
        engine = make_engine(propose=lambda prompt, at: Draft.chain(right(prompt, at, 5)))
        params = SamplingParams(max_tokens=20, ignore_eos=True, speculative=speculative)
        request = make_request("a", PROMPT, params=params)
        engine.add(request)
        engine.step()
        sampled = []
        while (step := engine.step()) is not None:
            sampled.append(step.batch.items[0].num_sampled)
        assert request.output_token_ids == answer(request) and max(sampled) == most


def test_what_was_drafted_is_counted(make_engine, make_request, run):
    def propose(prompt, position):
        first, second = right(prompt, position, 2)
        return Draft.chain([first, second, 96])

    engine = make_engine(propose=propose)
    request = make_request("a", PROMPT, max_tokens=11)
    engine.add(request)
    run(engine)
    drafts = request.stats.drafts
    assert drafts == engine.scheduler.drafts
    assert drafts.num_drafts == 3 and drafts.num_tokens == 9 and drafts.num_accepted == 6
    assert drafts.accepted_by_position == [3, 3]
    assert drafts.mean_accepted_length == 3.0 and drafts.acceptance_rate == 6 / 9
    stats = engine.stats()
    assert stats.num_drafts == 3 and stats.draft_accepted_by_position == (3, 3)


def test_nothing_is_drafted_before_blocks_are_copied(make_engine, make_request, run):
    """A drafter that writes to slots would overwrite what is to be copied."""
    due: list[bool] = []

    def propose(prompt, position):
        due.append(engine.scheduler.block_manager.has_due_copies)
        return None

    engine = make_engine(propose=propose, prefix_caching=False)
    first = make_request("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=8)
    engine.add(first)
    engine.add(make_request("b", [1, 2, 3, 4, 5, 6, 7], max_tokens=8, fork_of=first))
    copies = 0
    while (step := engine.step()) is not None:
        copies += len(step.batch.block_copies)
    assert copies > 0 and due and not any(due)


def test_no_request_is_preempted_for_a_draft(make_engine, make_request, run):
    propose = lambda prompt, at: Draft.chain([96] * 6)  # noqa: E731
    counts = []
    for drafts in (None, propose):
        engine = make_engine(9, 2, propose=drafts, prefix_caching=False)
        for index in range(3):
            engine.add(make_request(str(index), [index] * 4, max_tokens=10))
        run(engine)
        counts.append(engine.scheduler.num_preemptions)
    assert counts[0] == counts[1] > 0


def test_stop_tokens_end_a_request_within_a_draft(make_engine, make_request, run):
    stop = right(PROMPT, 5, 4)[2]
    engine = make_engine(propose=lambda prompt, at: Draft.chain(right(prompt, at, 6)))
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    request = make_request("a", PROMPT, params=params)
    engine.add(request)
    run(engine)
    assert request.output_token_ids == right(PROMPT, 5, 3)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)


def test_a_draft_waits_for_what_is_in_flight(make_engine, make_request, run):
    engine = make_engine(
        depth=2, propose=lambda prompt, at: Draft.chain(right(prompt, at, 3)), passes=5
    )
    request = make_request("a", PROMPT, max_tokens=30)
    engine.add(request)
    run(engine)
    assert request.output_token_ids == answer(request)
    assert engine.scheduler.drafts.num_accepted > 15


def test_drafts_of_what_has_ended_are_forgotten(make_engine, make_request, run):
    engine = make_engine(propose=lambda prompt, at: Draft.chain([1]))
    requests = [make_request(str(index), [index]) for index in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort("1")
    run(engine)
    assert not engine.scheduler.proposer.known


# -- steps that overlap ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_is_in_several_steps_at_once(make_engine, make_request, depth):
    engine = make_engine(depth=depth)
    request = make_request("a", PROMPT, max_tokens=6)
    engine.add(request)
    for number in range(depth):
        assert engine.begin_step()
        assert request.num_tokens_in_flight == 5 + number and request.num_output_tokens == 0
    assert request.num_awaited_tokens == depth
    engine.finish_step()
    assert request.num_output_tokens == 1 and request.num_awaited_tokens == depth - 1
    num_steps = depth
    while engine.has_unfinished_requests:
        num_steps += engine.begin_step()
        engine.finish_step()
    assert request.output_token_ids == answer(request)
    assert num_steps == 6  # no step too many: its length is known before its tokens are
    assert engine.scheduler.block_manager.num_used_blocks == 0


def test_a_prompt_is_computed_in_overlapping_chunks(make_engine, make_request, run):
    engine = make_engine(depth=3, max_num_batched_tokens=4)
    request = make_request("a", list(range(11)), max_tokens=3)
    engine.add(request)
    for _ in range(3):
        engine.begin_step()
    assert request.num_tokens_in_flight == 11 and request.num_computed_tokens == 0
    run(engine)
    assert request.output_token_ids == answer(request)


@pytest.mark.parametrize("depth", [2, 3])
def test_what_was_planned_beyond_a_stop_is_dropped(make_engine, make_request, depth):
    stop = right(PROMPT, 5, 3)[2]
    engine = make_engine(depth=depth)
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    request = make_request("a", PROMPT, params=params)
    engine.add(request)
    blocks = engine.scheduler.block_manager
    while not request.is_finished:
        engine.step()
    # Its last steps still run, and write to its blocks.
    assert request.num_tokens_in_flight == depth - 1 and blocks.num_used_blocks > 0
    assert engine.has_unfinished_requests
    while (step := engine.step()) is not None:
        assert step.updates == []
    assert request.output_token_ids == right(PROMPT, 5, 3)
    assert blocks.num_used_blocks == 0 and blocks.num_cached_blocks == (5 + 2) // 4


@pytest.mark.parametrize("depth", [2, 3])
def test_an_abort_in_flight_frees_blocks_when_the_last_step_has_ended(
    make_engine, make_request, depth
):
    engine = make_engine(depth=depth)
    engine.add(make_request("a", PROMPT, max_tokens=20))
    for _ in range(depth):
        engine.begin_step()
    engine.abort("a")
    used = []
    while engine.has_unfinished_requests:
        step = engine.finish_step()
        assert step.updates == []
        used.append(step.stats.num_used_blocks)
    assert all(used[:-1]) and len(used) == depth and used[-1] == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_the_same_answers_with_preemptions(make_engine, make_request, run, depth):
    engine = make_engine(12, 2, depth=depth, max_num_batched_tokens=6)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    requests = [make_request(str(index), [index] * 5, max_tokens=15) for index in range(6)]
    for request in requests:
        engine.add(request)
    run(engine)
    assert engine.scheduler.num_preemptions > 5
    assert all(request.output_token_ids == answer(request) for request in requests)


def test_whoever_is_in_no_step_comes_first(make_engine, make_request):
    engine = make_engine(depth=2)
    for name in "ab":
        engine.add(make_request(name, [1], max_tokens=5))
    engine.step()
    engine.finish_step()
    engine.scheduler.config = replace(engine.scheduler.config, max_num_batched_tokens=1)
    names = []
    while engine.has_unfinished_requests:
        step = engine.step()
        names.append(step.batch.items[0].request.request_id)
    assert names == list("ababab")


def test_without_tokens_of_its_own_an_executor_has_a_request_in_one_step(make_engine, make_request):
    engine = make_engine(depth=2, runs_ahead=False)
    engine.add(make_request("a", PROMPT))
    assert engine.begin_step() and not engine.begin_step()


def test_who_needs_the_host_waits_for_its_tokens_and_others_do_not(make_engine, make_request):
    engine = make_engine(depth=2, feeds=lambda request: request.request_id != "host")
    host, fed = (make_request(name, [1], max_tokens=6) for name in ("host", "fed"))
    for request in (host, fed):
        engine.add(request)
    ahead = {"host": 0, "fed": 0}
    while (step := engine.step()) is not None:
        for item in step.batch.items:
            ahead[item.request.request_id] += item.request.num_tokens_in_flight
    assert ahead == {"host": 0, "fed": 5}
    assert all(request.output_token_ids == answer(request) for request in (host, fed))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("guilty", range(5))
def test_a_step_that_raises_takes_what_ran_ahead_of_it_along(
    make_engine, make_request, run, depth, guilty
):
    """And nobody else is blamed, though later steps raise too for want of a token."""
    around = partial(FaultyExecutor, poison={"raise": 90 + guilty})
    engine = make_engine(256, 4, depth=depth, max_num_seqs=32, around=around)
    requests = [make_request(f"r{i}", [90 + i, i], max_tokens=8) for i in range(5)]
    for request in requests:
        engine.add(request)
    run(engine)
    for index, request in enumerate(requests):
        if index == guilty:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert request.output_token_ids == answer(request)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("period", [2, 3, 7])
def test_steps_that_raise_now_and_then_change_no_answer(
    make_engine, make_request, run, depth, period
):
    requests = [make_request(f"r{i}", [i, 1, 2], max_tokens=12) for i in range(4)]
    raises = every(period)
    # Only while there is company: a request that raises alone ends.
    around = partial(
        UnreliableExecutor, raises=lambda: len(engine.scheduler.running) > 3 and raises()
    )
    engine = make_engine(64, 4, depth=depth, around=around)
    for request in requests:
        engine.add(request)
    run(engine)
    for request in requests:
        if request.finish_reason is FinishReason.ERROR:
            assert "as was asked for" in request.error
        else:
            assert request.output_token_ids == answer(request)


# -- multi-step decoding ---------------------------------------------------------------------


def test_multi_step_ends_where_somebody_would_have_to_wait():
    assert multi_steps_in_time(8, MULTI_STEP_SECONDS / 100) == 8
    assert multi_steps_in_time(8, MULTI_STEP_SECONDS / 4.5) == 4
    assert multi_steps_in_time(8, MULTI_STEP_SECONDS * 3) == 1
    assert multi_steps_in_time(8, 0.0) == 8
    assert math.isclose(multi_steps_in_time(4, MULTI_STEP_SECONDS / 4), 4)
