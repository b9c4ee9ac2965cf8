"""Whatever is drafted, tokens and log-probabilities are those of plain decoding, to the last bit.

Under every setting of the sampler, with masks and penalties that follow each token, in any company,
with prefix hits, preemptions and chunks: from drafts that are right to the end to nonsense.
"""

from __future__ import annotations

import random

import pytest
from faults import FaultyForward, FaultyScheduler, every
from hash_model import FunctionProposer

from octavo.core.batch import DAMAGED, Draft
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import create_mask

KERNELS = ("reference", "native", "fused")


def make_requests(vocab_size: int, count: int = 16) -> list[Request]:
    """Every setting that can change a token, in some request."""
    rng = random.Random(11)
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
        {"temperature": 0.8, "min_p": 0.05, "logprobs": 0},
        {"temperature": 1.0, "typical_p": 0.7},
        {"temperature": 1.0, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -100.0}, "logprobs": 2},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(4, 40))},
        {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(3, vocab_size, 7))},
        {"temperature": 0.7, "stop_token_ids": tuple(range(2, vocab_size, 11))},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "bad_words": ("x",)},
        {"temperature": 1.5, "logprobs": 1},
    ]
    requests: list[Request] = []
    for index in range(count):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 30))]
        prompt = shared[: rng.choice([0, 17, 40])] + own
        params = SamplingParams(
            max_tokens=rng.randint(13, 40), ignore_eos=True, **settings[index % len(settings)]
        )
        bad = (
            [[rng.randrange(vocab_size)] for _ in range(40)] + [[7, 8]] if params.bad_words else []
        )
        leader = requests[-1] if index == count - 1 else None  # a second sample of its prompt
        if leader is not None:
            prompt, params = list(leader.prompt_token_ids), leader.params
        requests.append(
            Request(
                f"r{index}",
                prompt,
                params,
                0.0,
                seed=leader.seed if leader is not None else index,
                sample_index=int(leader is not None),
                fork_of=leader,
                mask=create_mask(params, vocab_size, params.stop_token_ids, bad),
            )
        )
    return requests


class Drafts:
    """Drafts from known answers, of which a random share is wrong.

    Args:
        right: how many of the tokens are right.
    """

    def __init__(self, answers, requests, right: float, vocab_size: int, most: int = 7):
        # By prompt alone: of two samples of one, the drafts for the second are wrong.
        self._texts = {
            tuple(each.prompt_token_ids): [*each.prompt_token_ids, *answers[each.request_id][0]]
            for each in reversed(requests)
        }
        self._rng = random.Random(5)
        self._right, self._vocab_size, self._most = right, vocab_size, most

    def __call__(self, prompt_token_ids, position):
        rng = self._rng
        tokens = self._texts[tuple(prompt_token_ids)][position:][: rng.randint(0, self._most)]
        drafted = [
            token if rng.random() < self._right else rng.randrange(self._vocab_size)
            for token in tokens
        ]
        return Draft.chain(drafted) if drafted else None


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(bench, run_all, kernels):
    engine = bench.engine(prefix_caching=False, kernels=kernels)
    return run_all(engine, make_requests(bench.config.vocab_size), together=False)[0]


VARIANTS = {
    "right": {"right": 1.0},
    "often right": {"right": 0.85},
    "nonsense": {"right": 0.0},
    "one at a time": {"right": 0.9, "max_num_seqs": 1},
    "seven": {"right": 0.9, "max_num_seqs": 7},
    "small budget": {"right": 0.9, "max_num_batched_tokens": 9},
    "no prefix cache": {"right": 0.9, "prefix_caching": False},
    "tiny pool": {"right": 0.9, "num_blocks": 8},
    "tiny pool, host cache": {"right": 0.9, "num_blocks": 8, "num_places": 30},
    "long blocks": {"right": 0.9, "block_size": 32, "num_blocks": 32},
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(bench, run_all, alone, kernels, name):
    variant = dict(VARIANTS[name])
    vocab_size = bench.config.vocab_size
    requests = make_requests(vocab_size)
    drafts = Drafts(alone, requests, variant.pop("right"), vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts), **variant)
    answers, _ = run_all(engine, requests)
    assert answers == alone
    counted = engine.scheduler.drafts
    assert counted.num_tokens > 50
    assert counted.num_accepted > 20 or name == "nonsense"


def test_preemption_every_third_step_changes_nothing(bench, run_all, alone, kernels):
    vocab_size = bench.config.vocab_size
    requests = make_requests(vocab_size)
    drafts = Drafts(alone, requests, 0.9, vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts, passes=3))
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, requests)
    assert answers == alone
    assert engine.scheduler.num_preemptions > 5


def test_a_warm_cache_has_no_token_that_was_rejected(bench, run_all, alone, kernels):
    vocab_size = bench.config.vocab_size
    requests = make_requests(vocab_size)
    drafts = Drafts(alone, requests, 0.5, vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts))
    run_all(engine, requests)
    answers, _ = run_all(engine, make_requests(vocab_size))
    assert answers == alone
    assert engine.scheduler.prefix_tokens_hit > 0


def test_aborts_in_the_middle_of_a_draft_leave_no_slot_behind(bench, alone, kernels):
    vocab_size = bench.config.vocab_size
    requests = make_requests(vocab_size)
    drafts = Drafts(alone, requests, 0.8, vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts))
    for request in requests:
        engine.add(request)
    for number in range(200):
        if not engine.begin_step():
            break
        if number % 3 == 2 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[0].request_id)
        engine.finish_step()
        engine.check_integrity()
    assert not engine.has_unfinished_requests
    assert engine.scheduler.block_manager.num_used_blocks == 0


def test_a_draft_that_turns_to_nan_costs_no_request_anything(bench, run_all, alone, kernels):
    """Rows after the last known token are damaged now and then; the next step finds out."""
    vocab_size = bench.config.vocab_size
    requests = make_requests(vocab_size)
    drafts = Drafts(alone, requests, 1.0, vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts), max_num_seqs=1)
    runner = engine.executor.runner
    submit, damages = runner.forward.submit, every(3)

    def damaging(batch, *rest):
        rows = submit(batch, *rest).result()
        if batch.items[0].draft is not None and damages():
            rows.damaged = [len(batch.items[0].draft)]
        return rows

    runner.forward.submit = damaging
    answers, _ = run_all(engine, requests)
    assert answers == alone


def test_a_known_token_that_turns_to_nan_ends_its_request(bench, alone, kernels):
    vocab_size = bench.config.vocab_size
    request = make_requests(vocab_size)[0]
    drafts = Drafts(alone, [request], 1.0, vocab_size)
    engine = bench.engine(kernels=kernels, proposer=FunctionProposer(drafts))
    engine.add(request)
    engine.step()
    runner = engine.executor.runner
    runner.forward = FaultyForward(runner.forward, damages=every(1))
    engine.step()
    assert (request.finish_reason, request.error) == (FinishReason.ERROR, DAMAGED)
