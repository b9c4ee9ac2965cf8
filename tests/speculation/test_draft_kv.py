"""What a draft model has computed, under block ids that are the target's to give and take."""

from __future__ import annotations

import random

from drafting_double import DraftingDouble, knows_the_hash_model
from faults import FaultyScheduler, every
from hash_model import HashExecutor, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.speculation.autoregressive import AutoregressiveLimits, AutoregressiveProposer
from octavo.speculation.draft_kv import DraftKV

BLOCK = 4


def a_request(tokens, block_ids, request_id="r", salt="") -> Request:
    request = Request(request_id, tokens, SamplingParams(), 0.0, cache_salt=salt)
    request.block_ids = block_ids
    return request


def compute(kv: DraftKV, request: Request, draft_tokens=()) -> int:
    """All that is missing; how much it was."""
    start, text = kv.num_computed(request), [*request.token_ids, *draft_tokens]
    kv.begin(request, start, len(text))
    kv.finish(request, text, len(text))
    return len(text) - start


def test_only_new_tokens_are_missing():
    kv = DraftKV(8, BLOCK)
    request = a_request([1, 2, 3, 4, 5], [3, 1])
    assert compute(kv, request) == 5
    assert kv.num_computed(request) == 5
    request.token_ids += [6, 7, 8, 9]
    request.block_ids.append(0)
    assert compute(kv, request) == 4


def test_draft_tokens_count_as_far_as_they_were_accepted():
    kv = DraftKV(8, BLOCK)
    request = a_request([1, 2, 3], [3, 1])
    assert compute(kv, request, draft_tokens=[4, 5, 6]) == 6
    request.token_ids += [4, 5, 7]
    assert kv.num_computed(request) == 5
    assert compute(kv, request) == 1
    # The wrong one filled no block under its name.
    other = a_request([1, 2, 3, 4, 5, 6], [3, 1], "other")
    assert kv.num_computed(other) == 5


def test_whoever_has_the_same_blocks_and_tokens_has_what_was_computed():
    kv = DraftKV(8, BLOCK)
    compute(kv, a_request([1, 2, 3, 4, 5, 6], [3, 1], "first"))
    assert kv.num_computed(a_request([1, 2, 3, 4, 9], [3, 2], "shares")) == 4
    assert kv.num_computed(a_request([1, 2, 3, 4, 5, 9], [3, 1], "forks")) == 5
    assert kv.num_computed(a_request([1, 2, 9, 4, 5, 6], [3, 1], "differs")) == 2
    # The same tokens after others are other keys and values.
    assert kv.num_computed(a_request([5, 6, 3, 4], [1], "moves")) == 0
    assert kv.num_computed(a_request([1, 2, 3, 4], [3], "tenant", salt="secret")) == 0


def test_a_block_that_was_copied_or_adopted_is_looked_at_again():
    kv = DraftKV(8, BLOCK)
    request = a_request([*range(10)], [0, 1, 2])
    compute(kv, request)
    request.block_ids[1] = 5
    assert kv.num_computed(request) == 4
    compute(kv, request)
    request.block_ids[1] = 1  # where it still is
    assert kv.num_computed(request) == 10


def test_a_block_of_somebody_else_holds_nothing():
    kv = DraftKV(8, BLOCK)
    compute(kv, a_request([*range(8)], [0, 1], "first"))
    compute(kv, a_request([*range(20, 25)], [1, 0], "second"))
    again = a_request([*range(8)], [0, 1], "third")
    assert kv.num_computed(again) == 0


def test_what_was_begun_and_failed_is_not_there():
    kv = DraftKV(8, BLOCK)
    request = a_request([*range(6)], [0, 1])
    compute(kv, request)
    request.token_ids += [6, 7]
    assert kv.num_computed(request) == 6
    kv.begin(request, 5, 8)
    assert kv.num_computed(request) == 5
    kv.forget(request)
    assert kv.num_computed(request) == 5


def test_after_a_failure_all_are_looked_up_by_their_blocks():
    kv = DraftKV(8, BLOCK)
    one, other = a_request([*range(6)], [0, 1], "one"), a_request([*range(6)], [0, 1], "other")
    compute(kv, one)
    assert kv.num_computed(other) == 6
    kv.begin(other, 2, 6)
    kv.abandon()
    assert kv.num_computed(one) == kv.num_computed(other) == 2


@settings(max_examples=40)
@given(
    num_blocks=st.integers(6, 24),
    block_size=st.integers(1, 4),
    seed=st.integers(0, 1000),
    preempts=st.integers(2, 9),
    caching=st.booleans(),
    budget=st.integers(4, 24),
)
def test_no_slot_is_read_that_holds_something_else(
    num_blocks, block_size, seed, preempts, caching, budget
):
    """Under an engine that shares, forks, copies, preempts, aborts and gives blocks to others."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for index in range(8):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
        params = SamplingParams(max_tokens=rng.randint(1, 10), ignore_eos=True)
        requests.append(Request(f"r{index}", prompt, params, 0.0))
        if rng.random() < 0.5:
            fork = Request(f"f{index}", prompt, params, 0.0, fork_of=requests[-1])
            requests.append(fork)
    prompts = dict.fromkeys(tuple(request.prompt_token_ids) for request in requests)
    double = DraftingDouble(knows_the_hash_model(prompts, seed), num_blocks, block_size)
    double.breaks = lambda item: "NaN" if rng.random() < 0.05 else None
    limits = AutoregressiveLimits(4, 0.2, 97, True, 1000, budget)
    proposer = AutoregressiveProposer(double.run, DraftKV(num_blocks, block_size), limits)
    cache = RadixPrefixCache(block_size) if caching else NoPrefixCache()
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=6, max_model_len=24)
    blocks = BlockManager(num_blocks, block_size, cache)
    scheduler = Scheduler(config, blocks, proposer=proposer)
    engine = Engine(
        FaultyScheduler.in_place_of(scheduler, preempts=every(preempts)),
        HashExecutor(num_blocks, block_size),
    )
    queue = [
        request
        for request in requests
        if request.num_prompt_tokens + request.params.max_tokens <= num_blocks * block_size
    ]
    running = list(queue)
    while queue or engine.has_unfinished_requests:
        if queue and rng.random() < 0.5:
            engine.add(queue.pop(0))
        if rng.random() < 0.03 and running:
            engine.abort(rng.choice(running).request_id)
        engine.step()
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running)
    assert double.faults == []
    for request in running:
        answer = request.output_token_ids
        assert answer == expected_tokens(request.prompt_token_ids, len(answer), 97)
    assert not proposer._followers and not proposer._kv._sequences


def test_each_token_is_computed_about_once():
    prompt = [*range(20)]
    double = DraftingDouble(knows_the_hash_model({tuple(prompt): 0}, 1), 32, 4)
    limits = AutoregressiveLimits(4, 0.2, 97, True, 1000, 64)
    proposer = AutoregressiveProposer(double.run, DraftKV(32, 4), limits)
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), BlockManager(32, 4), None, proposer)
    engine = Engine(scheduler, HashExecutor(32, 4))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.add(Request("r", prompt, params, 0.0))
    while engine.step() is not None:
        pass
    assert double.faults == []
    drafts = scheduler.drafts
    assert drafts.num_accepted > 10
    # Rejected draft tokens are computed anew, and those that were not verified at all.
    assert double.num_computed < 80 + 2 * (drafts.num_tokens - drafts.num_accepted) + 20
