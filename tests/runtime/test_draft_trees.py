"""Drafts that are trees under the engine: whatever is drafted, the answers are those of plain
decoding, in tokens and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hash_model import FunctionProposer

from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.engine import Engine
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import create_mask
from octavo.kernels.cpu import library
from octavo.kernels.cpu.layout import KV_FORMATS

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
KERNELS = [pytest.param("native", marks=needs_native), "reference"]
MAX_LEN = 300  # across a split of 256


class Trees(FunctionProposer):
    """Drafts random trees, in which what is right is often somewhere.

    Args:
        answers: the tokens that follow each request's prompt, by request id.
    """

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int, vocab_size: int):
        super().__init__(lambda prompt, position: None)
        self._answers = answers
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self.num_moved = 0  # accepted drafts whose right tokens were not in the right slots
        self.most_accepted = 0

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        return {
            opening.request.request_id: self._draft(opening.request)
            for opening in openings
            if self._rng.random() < 0.9
        }

    def _draft(self, request: Request) -> Draft:
        rng = self._rng
        self.known.add(request.request_id)
        truth = self._answers[request.request_id][request.num_output_tokens :]
        token_ids: list[int] = []
        parents: list[int] = []
        right = {-1: 0}  # nodes of the right path, and how far they are down it
        for index in range(rng.randint(1, self.max_tokens)):
            parent = rng.choice([rng.randint(-1, index - 1), max(right)])
            down = right.get(parent, len(truth))
            token_id = rng.randrange(self._vocab_size)
            if down < len(truth) and rng.random() < 0.7:
                token_id = truth[down]
            if (parent, token_id) in zip(parents, token_ids, strict=True):
                break
            if down < len(truth) and token_id == truth[down]:
                right[index] = down + 1
            token_ids.append(token_id)
            parents.append(parent)
        return Draft(tuple(token_ids), tuple(parents))

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        super().observe(request, draft, num_accepted)
        follow = request.output_token_ids[-1 - num_accepted :]
        path = draft.path(follow[:num_accepted])
        assert len(path) == num_accepted
        self.num_moved += path != list(range(num_accepted))
        self.most_accepted = max(self.most_accepted, num_accepted)


def make_requests(vocab_size: int, count: int = 9) -> list[Request]:
    """Prompts of all lengths, some with a shared prefix, and whatever may be asked of tokens."""
    rng = random.Random(2)
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    lengths = [1, 14, 120, 60, 62, 240, 250, 255, 30]
    requests: list[Request] = []
    for index in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(25, 40),
            temperature=[0.0, 0.8, 1.5][index % 3],
            top_p=0.9 if index % 4 == 1 else 1.0,
            repetition_penalty=1.2 if index % 4 == 2 else 1.0,
            frequency_penalty=0.3 if index % 5 == 3 else 0.0,
            ignore_eos=True,
            logprobs=3 if index % 2 else None,
            prompt_logprobs=1 if index == 3 else None,
            min_tokens=6 if index % 3 == 2 else 0,
            allowed_token_ids=range(3, vocab_size, 2) if index == 6 else None,
        )
        mask = create_mask(params, vocab_size, range(40, 90), [(5,), (9, 11)] if index == 4 else [])
        prompt = [rng.randrange(2, vocab_size) for _ in range(lengths[index])]
        if index % 3 == 0:
            prompt = [*shared, *prompt][: lengths[index]]
        requests.append(Request(f"r{index}", prompt, params, 0.0, seed=index, mask=mask))
    return requests


def check(bench, run_all, make, seed: int, **options) -> Engine:
    """Run requests without drafts, and then with trees, on an engine that is returned."""
    options = {"max_model_len": MAX_LEN, "num_blocks": 200, **options}
    plain, _ = run_all(
        bench.engine(**{**options, "num_blocks": 200, "prefix_caching": False}), make()
    )
    answers = {request_id: tokens for request_id, (tokens, _) in plain.items()}
    proposer = Trees(answers, seed, bench.config.vocab_size)
    engine = bench.engine(**options, proposer=proposer)
    drafted, steps = run_all(engine, make())
    assert drafted == plain
    assert len(steps) < sum(map(len, answers.values()))
    assert proposer.num_moved > 3 and proposer.most_accepted > 2
    return engine


VARIANTS = {
    "blocks of 16": {},
    "blocks of 32": {"block_size": 32},
    "no prefix cache": {"prefix_caching": False},
    "tiny pool": {"num_blocks": 20},
    "three slots": {"max_num_seqs": 3},
    "budget 24": {"max_num_batched_tokens": 24},
    "two threads": {"threads": 2},
}


@needs_native
@pytest.mark.parametrize("name", VARIANTS)
def test_native_answers_are_those_of_plain_decoding(bench, run_all, name):
    engine = check(
        bench,
        run_all,
        lambda: make_requests(bench.config.vocab_size),
        seed=len(name),
        kernels="native",
        **VARIANTS[name],
    )
    assert name != "tiny pool" or engine.scheduler.num_preemptions > 0


@needs_native
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_in_every_format_of_the_kv_cache(bench, run_all, kv_cache_dtype):
    check(
        bench,
        run_all,
        lambda: make_requests(bench.config.vocab_size)[3:8],
        seed=1,
        kernels="native",
        kv_cache_dtype=kv_cache_dtype,
    )


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_reference_answers_are_those_of_plain_decoding(bench, run_all, kv_cache_dtype):
    check(
        bench,
        run_all,
        lambda: make_requests(bench.config.vocab_size)[:6],
        seed=3,
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=40,
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_requests_aborted_while_their_trees_are_computed(bench, run_all, kernels):
    """The others notice nothing, and no block is lost."""
    vocab_size = bench.config.vocab_size
    options = {"kernels": kernels, "max_model_len": MAX_LEN}
    plain, _ = run_all(bench.engine(**options), make_requests(vocab_size, 5))
    answers = {request_id: tokens for request_id, (tokens, _) in plain.items()}
    engine = bench.engine(**options, proposer=Trees(answers, 4, vocab_size))
    requests = make_requests(vocab_size, 5)
    for request in requests:
        engine.add(request)
    aborted: list[str] = []
    while engine.has_unfinished_requests:
        engine.begin_step()
        if len(aborted) < 2:
            batch = engine._submitted[0].batch
            for item in batch.items:
                if item.draft is not None and not item.draft.is_chain:
                    engine.abort(item.request.request_id)
                    aborted.append(item.request.request_id)
                    break
        engine.finish_step()
        engine.check_integrity()
    assert len(aborted) == 2
    for request in requests:
        if request.request_id not in aborted:
            assert request.output_token_ids == answers[request.request_id]
    engine.scheduler.block_manager.check_integrity([])
