"""Masks against what their words say: a token may come, or it may not, at each position."""

from __future__ import annotations

import random
import time

import pytest

from octavo.core.batch import StepOutput
from octavo.core.block_manager import BlockManager
from octavo.core.prefix_cache import NoPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.token_mask import AllOf, AllowedTokens, BadWords, MinTokens, create_mask

VOCAB = 75


def allowed(mask, vocab_size: int = VOCAB) -> set[int]:
    bits = mask.bitmask()
    if bits is None:
        return set(range(vocab_size))
    assert len(bits) == -(-vocab_size // 32)
    return {t for t in range(vocab_size) if bits[t // 32] >> t % 32 & 1}


def banned(mask) -> set[int]:
    return set(range(VOCAB)) - allowed(mask)


def test_nothing_forbidden_is_no_mask():
    assert create_mask(SamplingParams(), VOCAB, [2], []) is None
    assert create_mask(SamplingParams(min_tokens=3), VOCAB, [], [()]) is None


@pytest.mark.parametrize("token_ids", [[0], [31, 32], [63, 64, 74], range(VOCAB), [3, 3, 75, -1]])
def test_allowed_tokens(token_ids):
    mask = create_mask(SamplingParams(allowed_token_ids=[t for t in token_ids if t >= 0]), VOCAB)
    assert isinstance(mask, AllowedTokens) and not mask.is_over
    assert allowed(mask) == {t for t in token_ids if 0 <= t < VOCAB}
    mask.advance([1, 2])
    assert allowed(mask) == {t for t in token_ids if 0 <= t < VOCAB}


def test_stop_tokens_come_after_the_least_number_of_tokens():
    mask = create_mask(SamplingParams(min_tokens=3), VOCAB, [2, 40, 1000])
    assert isinstance(mask, MinTokens)
    for _ in range(3):
        assert not mask.is_over and banned(mask) == {2, 40}
        mask.advance([7])
    assert mask.is_over and mask.bitmask() is None
    mask.rollback(2)
    assert not mask.is_over and banned(mask) == {2, 40}


def banned_by_search(words, output) -> set[int]:
    """The slow twin: each word is compared with the end of the output."""
    found = set()
    for *prefix, last in filter(None, words):
        if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
            found.add(last)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_bad_words_are_found_however_one_got_there(seed):
    rng = random.Random(seed)
    alphabet = range(2 + seed)
    words = [[rng.choice(alphabet) for _ in range(rng.randrange(6))] for _ in range(8)]
    mask, output = BadWords(words, VOCAB), []
    others = []
    for _ in range(300):
        match rng.randrange(4):
            case 0:
                count = (
                    rng.randrange(len(output) + 1) if rng.random() < 0.2 else min(2, len(output))
                )
                mask.rollback(count)
                del output[len(output) - count :]
            case 1:
                others.append((mask, output.copy()))
                mask = mask.fork()
            case _:
                new = [rng.choice(alphabet) for _ in range(rng.randrange(4))]
                mask.advance(new)
                output += new
        assert mask.num_tokens == len(output)
        assert banned(mask) == banned_by_search(words, output)
    for left, its_output in others:  # a fork does not move the one it came from
        assert banned(left) == banned_by_search(words, its_output)


def test_the_prompt_does_not_count():
    mask = BadWords([(1, 2, 3)], VOCAB)
    mask.advance([2])
    assert banned(mask) == set()


def test_masks_together():
    params = SamplingParams(allowed_token_ids=[1, 2, 3, 40], min_tokens=2)
    mask = create_mask(params, VOCAB, [2], [(3,), (1, 40)])
    assert isinstance(mask, AllOf) and not mask.is_over
    fork = mask.fork()
    for token_id, expected in ((1, {1}), (3, {1, 2, 40})):
        mask.advance([token_id])
        assert allowed(mask) == expected
    mask.rollback(1)
    assert allowed(mask) == {1}
    assert fork.num_tokens == 0 and allowed(fork) == {1, 40}
    assert create_mask(SamplingParams(min_tokens=1), VOCAB, [2], [(3, 4)]).bitmask() is not None


def test_masks_together_change_when_one_does():
    mask = create_mask(SamplingParams(allowed_token_ids=range(VOCAB)), VOCAB, [], [(7,), (1, 40)])
    first = mask.bitmask()
    mask.advance([3, 4])
    assert mask.bitmask() is first  # nothing is made anew
    for token_id, expected in ((1, {7, 40}), (1, {7, 40}), (2, {7})):
        mask.advance([token_id])
        assert banned(mask) == expected
    mask.rollback(2)
    assert banned(mask) == {7, 40}


def test_a_request_asks_its_mask_about_the_tokens_it_has():
    mask = create_mask(SamplingParams(min_tokens=2), VOCAB, [2], [(5, 6)])
    request = Request("r", [5], SamplingParams(), 0.0, mask=mask)
    assert request.is_masked and banned(request) == {2}
    request.token_ids += [9, 5]
    assert banned(request) == {6}
    request.token_ids.pop()
    assert banned(request) == {2}
    free = Request("f", [5], SamplingParams(), 0.0)
    assert not free.is_masked and free.bitmask() is None
    least = Request("m", [5], SamplingParams(), 0.0, mask=MinTokens(1, [2], VOCAB))
    assert least.is_masked
    least.token_ids.append(9)
    assert not least.is_masked


def test_thousands_of_bad_words_cost_no_more_than_a_few():
    def cost(count: int) -> float:
        rng = random.Random(1)
        words = [[rng.randrange(30_000) for _ in range(4)] for _ in range(count)]
        mask = BadWords(words, 50_000)
        text = [token_id for word in words[:20] for token_id in word[:3]]
        best = 1.0
        for _ in range(5):
            fork, begin = mask.fork(), time.perf_counter()
            for token_id in text:
                fork.advance([token_id])
                fork.bitmask()
            best = min(best, time.perf_counter() - begin)
        return best

    assert cost(5000) < 10 * cost(20)


def test_a_masked_request_takes_its_tokens_one_by_one():
    """And as many as the executor likes once nothing is masked any more."""
    config = SchedulerConfig(max_model_len=64, max_multi_steps=8)
    scheduler = Scheduler(config, BlockManager(8, 16, NoPrefixCache()))
    params = SamplingParams(max_tokens=30, min_tokens=2)
    request = Request("r", [1, 2], params, 0.0, mask=create_mask(params, VOCAB, [0]))
    scheduler.add(request)
    sampled = []
    for _ in range(4):
        batch = scheduler.schedule()
        sampled.append(batch.items[0].num_sampled)
        scheduler.update(batch, StepOutput({"r": [7]}))
    assert sampled == [1, 1, 8, 8]


@pytest.mark.parametrize("seed", range(20))
def test_the_number_of_tokens_that_may_come_is_that_of_their_bits(seed):
    rng = random.Random(seed)
    words = [[rng.randrange(6) for _ in range(rng.randint(1, 3))] for _ in range(4)]
    mask = create_mask(
        SamplingParams(min_tokens=3, allowed_token_ids=range(rng.randint(4, 9))), VOCAB, [1], words
    )
    mask.advance([rng.randrange(6) for _ in range(rng.randint(0, 3))])
    before = mask.num_tokens
    for _ in range(50):
        tokens = [rng.randrange(8) for _ in range(rng.randint(0, 4))]
        expected, follower = 0, mask.fork()
        for token_id in tokens:
            if token_id not in allowed(follower):
                break
            expected += 1
            follower.advance([token_id])
        assert mask.num_allowed(tokens) == expected
    assert (
        mask.num_tokens == before
        and not mask.seconds
        and not mask.parts()
        and not mask.forced_tokens(4)
    )


def test_tokens_outside_of_the_vocabulary_may_not_come():
    assert AllowedTokens([3], VOCAB).num_allowed([3, 3000]) == 1
    assert AllowedTokens([3], VOCAB).num_allowed([-1]) == 0
