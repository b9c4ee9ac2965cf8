"""The GPU's forward pass on a stream that does nothing before it has to, over a model of
arithmetic: requests of all kinds, in all company, get what the sampler of the host makes of their
own tokens."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from fold_program import FoldProgram, logits_after
from queued_stream import QueuedStream

from octavo.core.batch import Draft
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.token_mask import create_mask
from octavo.executor.faulty import FaultyExecutor, FaultyScheduler, sometimes
from octavo.executor.hashing import GuessingProposer
from octavo.executor.local import LocalExecutor
from octavo.kernels.kv_stores import CODECS
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_forward import CudaForward
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.plain_sampler import PlainSampler
from octavo.runtime.rank import Rank
from octavo.runtime.sampler import sample
from octavo.runtime.sampling_row import sampling_row

VOCAB = FoldProgram.vocab_size


class FoldBackend:
    """Makes the forward pass of a rank."""

    name, isa, pool, weights_bytes = "fold", None, None, 0

    def __init__(self, stream, block_size: int, captures: bool = True, damaged_token: int = -1):
        self.stream, self.block_size = stream, block_size
        self.captures, self.damaged_token = captures, damaged_token

    def create_forward(self, limits: RankLimits, depths=()) -> CudaForward:
        codecs = CODECS["float32"]
        cache = KVCache(1, limits.num_blocks, self.block_size, 1, 4, codecs, self.stream.device)
        program = FoldProgram(cache, limits.max_num_batched_tokens, self.damaged_token)
        return CudaForward(
            program,
            cache,
            PlainSampler(),
            self.stream,
            limits,
            lambda runner: SimpleNamespace(),
            captures=self.captures,
        )


def make_engine(
    stream,
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    prefix_caching: bool = True,
    captures: bool = True,
    damaged_token: int = -1,
    proposer=None,
    **config,
) -> Engine:
    config = SchedulerConfig(**{"max_model_len": 64, "max_num_seqs": 8, **config})
    rank = Rank(RankSpec(Path()), None, FoldBackend(stream, block_size, captures, damaged_token))
    rank.start(
        RankLimits(
            num_blocks, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens
        )
    )
    executor = LocalExecutor(rank)
    cache = RadixPrefixCache(block_size) if prefix_caching else NoPrefixCache()
    limits = SchedulerConfig(**{**_fields(config), "runs_ahead": executor.feeds_tokens})
    scheduler = Scheduler(limits, BlockManager(num_blocks, block_size, cache), None, proposer)
    return Engine(scheduler, executor)


def _fields(config: SchedulerConfig) -> dict:
    return {name: getattr(config, name) for name in config.__slots__}


def make_request(name: str, prompt: list[int], seed: int = 0, fork_of=None, **params) -> Request:
    own = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params})
    mask = create_mask(own, VOCAB, stop_token_ids=(1, 2, 3), bad_words=[(4,), (5, 6)])
    index = 0 if fork_of is None else fork_of.sample_index + 1
    return Request(name, prompt, own, 0.0, 0, seed, index, mask=mask, fork_of=fork_of)


def expected(request: Request) -> tuple[list[int], list]:
    """Tokens of a request, and their log-probabilities: one after the other, by the host."""
    mask = request.mask and create_mask(request.params, VOCAB, (1, 2, 3), [(4,), (5, 6)])
    twin = Request(
        "twin",
        request.prompt_token_ids,
        request.params,
        0.0,
        0,
        request.seed,
        request.sample_index,
        mask=mask,
    )
    logprobs = []
    for _ in range(request.params.max_tokens):
        sampled = sample(logits_after(twin.token_ids), [sampling_row(twin)])
        assert not sampled.errors
        twin.token_ids += sampled.token_ids
        logprobs += sampled.logprobs
    return twin.output_token_ids, logprobs


def run(engine: Engine) -> dict[str, list]:
    """Log-probabilities by request, when all have ended."""
    found: dict[str, list] = {}
    while (step := engine.step()) is not None:
        for update in step.updates:
            found.setdefault(update.request.request_id, []).extend(update.logprobs)
    engine.check_integrity()
    return found


KINDS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.4, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7, "logprobs": 2},
    {"repetition_penalty": 1.4},
    {"temperature": 0.7, "frequency_penalty": 0.6, "logprobs": 0},
    {"logit_bias": {9: 4.0, 17: -5.0}},
    {"allowed_token_ids": [3, 4, 5, 60, 61]},
    {"min_tokens": 4, "temperature": 1.0},
]


def requests_of_all_kinds(rng: random.Random, count: int) -> list[Request]:
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    requests: list[Request] = []
    for index in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        prompt, fork_of, kind = shared[: rng.choice([0, 5, 12])] + own, None, rng.choice(KINDS)
        seed = rng.randrange(2**40)
        if requests and rng.random() < 0.2 and requests[-1].fork_of is None:
            fork_of = requests[-1]
            prompt, seed = list(fork_of.prompt_token_ids), fork_of.seed
        kind = {**kind, "max_tokens": rng.randint(4, 14)}
        requests.append(make_request(f"r{index}", prompt, seed, fork_of, **kind))
    return requests


def check(request: Request, logprobs: list) -> None:
    tokens, entries = expected(request)
    assert request.finish_reason is FinishReason.LENGTH, request.error
    assert request.output_token_ids == tokens, request.params
    assert len(logprobs) == (len(tokens) if request.params.logprobs is not None else 0)
    for entry, right in zip(logprobs, entries, strict=False):
        assert entry[0] == right[0] and entry.rank == right.rank
        assert entry.logprob == pytest.approx(right.logprob, abs=1e-5)
        assert [t for t, _ in entry.top] == [t for t, _ in right.top]


@pytest.mark.parametrize("seed", range(12))
def test_all_kinds_of_requests_get_what_is_theirs(seed):
    """Chunks, preemptions, forks, hits of the prefix cache, aborts, drafts, padding: all at once."""
    rng = random.Random(seed)
    stream = QueuedStream(captures=rng.random() < 0.8)
    drafts = rng.random() < 0.4
    engine = make_engine(
        stream,
        num_blocks=rng.choice([18, 30, 100]),
        block_size=rng.choice([4, 8]),
        prefix_caching=rng.random() < 0.8,
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        max_num_seqs=rng.choice([3, 8, 20]),
        proposer=GuessingProposer(chains(rng), passes=3) if drafts else None,
    )
    assert engine.executor.depth == 2
    engine.scheduler = FaultyScheduler.in_place_of(
        engine.scheduler, preempts=sometimes(rng.choice([0.0, 0.1]), seed)
    )
    engine.executor = FaultyExecutor(
        engine.executor, raises=sometimes(rng.choice([0.0, 0.02]), seed + 1)
    )
    requests, found, overlapping = requests_of_all_kinds(rng, 24), {}, 0
    waiting, live = requests.copy(), []
    while waiting or engine.has_unfinished_requests:
        if waiting and rng.random() < 0.5:
            live.append(waiting.pop(0))
            engine.add(live[-1])
        if live and rng.random() < 0.03:
            engine.abort(rng.choice(live).request_id)
        if (step := engine.step()) is None:
            continue
        overlapping += any(item.request.num_tokens_in_flight for item in step.batch.items)
        for update in step.updates:
            found.setdefault(update.request.request_id, []).extend(update.logprobs)
    ended = [r for r in requests if r.finish_reason is FinishReason.LENGTH]
    for request in ended:
        check(request, found[request.request_id])
    print(
        "OVER",
        seed,
        len(ended),
        overlapping,
        engine.scheduler.num_preemptions,
        stream.num_replays,
        stream.captures,
        drafts,
    )
    assert len(ended) > 12
    assert all(
        request.finish_reason is FinishReason.ABORT or "as was asked for" in request.error
        for request in requests
        if request not in ended
    )
    assert engine.scheduler.block_manager.num_used_blocks == 0


def chains(rng: random.Random):
    """Guesses, of which some are right for who is greedy."""

    def propose(prompt, position):
        request = make_request("draft", list(prompt), max_tokens=position - len(prompt) + 3)
        right = expected(request)[0][position - len(prompt) :]
        guesses = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in right]
        return Draft.chain(guesses) if rng.random() < 0.7 else None

    return propose
