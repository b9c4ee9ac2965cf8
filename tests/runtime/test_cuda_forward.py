"""The GPU's forward pass on a stream that does nothing before it has to, over a model of
arithmetic: requests of all kinds, in all company, get what the sampler of the host makes of their
own tokens."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults import FaultyScheduler, UnreliableExecutor, sometimes
from fold_program import FoldProgram, logits_after
from hash_model import FunctionProposer
from queued_stream import QueuedStream

from octavo.core.batch import Draft
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.token_mask import create_mask
from octavo.kernels.kv_stores import CODECS
from octavo.runtime import cuda_forward
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_forward import CudaForward
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.plain_sampler import PlainSampler
from octavo.runtime.rank import Rank
from octavo.runtime.sampler import compute_logprobs, sample
from octavo.runtime.sampling_row import sampling_row
from octavo.runtime.streams import HostStream

VOCAB = FoldProgram.vocab_size


class FoldBackend:
    """Makes the forward pass of a rank."""

    name, isa, pool, weights_bytes = "fold", None, None, 0
    has_window_tables = False
    has_sinks = False
    most_kv_layers = None

    def __init__(self, stream, block_size: int, captures: bool = True, damaged_token: int = -1):
        self.stream, self.block_size = stream, block_size
        self.captures, self.damaged_token = captures, damaged_token

    def create_forward(self, limits: RankLimits, depths=()) -> CudaForward:
        codecs = CODECS["float32"]
        cache = KVCache(1, limits.num_blocks, self.block_size, 1, 4, codecs, self.stream.device)
        program = FoldProgram(cache, limits.max_num_batched_tokens, self.damaged_token)
        forward = CudaForward(
            program,
            cache,
            PlainSampler(),
            self.stream,
            limits,
            lambda runner: SimpleNamespace(),
            captures=self.captures,
        )
        forward.capture()
        return forward


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
    cache = RadixPrefixCache(block_size) if prefix_caching else NoPrefixCache()
    limits = SchedulerConfig(**{**_fields(config), "runs_ahead": rank.feeds_tokens})
    scheduler = Scheduler(limits, BlockManager(num_blocks, block_size, cache), None, proposer)
    return Engine(scheduler, rank)


def _fields(config: SchedulerConfig) -> dict:
    return {name: getattr(config, name) for name in config.__slots__}


def make_request(name: str, prompt: list[int], seed: int = 0, fork_of=None, **params) -> Request:
    own = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params})
    mask = mask_of(own)
    index = 0 if fork_of is None else fork_of.sample_index + 1
    return Request(name, prompt, own, 0.0, 0, seed, index, mask=mask, fork_of=fork_of)


def mask_of(params: SamplingParams):
    bad_words = [(4,), (5, 6)] if params.bad_words else ()
    return create_mask(params, VOCAB, stop_token_ids=(1, 2, 3), bad_words=bad_words)


def expected(request: Request) -> tuple[list[int], list]:
    """Tokens of a request, and their log-probabilities: one after the other, by the host."""
    own, mask = request.params, mask_of(request.params)
    known = request.prompt_token_ids, own, 0.0, 0, request.seed, request.sample_index
    twin = Request("twin", *known, mask=mask)
    logprobs = []
    for _ in range(own.max_tokens):
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
    {"bad_words": ["a word"], "temperature": 1.0},
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


@pytest.mark.thinned(1, most=6)
@pytest.mark.parametrize("seed", range(12))
def test_all_kinds_of_requests_get_what_is_theirs(seed):
    """Chunks, preemptions, forks, hits of the prefix cache, aborts, drafts, padding at once."""
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
        proposer=FunctionProposer(chains(rng), passes=3) if drafts else None,
    )
    assert engine.executor.depth == 2
    engine.scheduler = FaultyScheduler.in_place_of(
        engine.scheduler, preempts=sometimes(rng.choice([0.0, 0.1]), seed)
    )
    engine.executor = UnreliableExecutor(
        engine.executor, raises=sometimes(rng.choice([0.0, 0.02]), seed + 1)
    )
    requests, found = requests_of_all_kinds(rng, 24), {}
    waiting, live = requests.copy(), []
    while waiting or engine.has_unfinished_requests:
        if waiting and rng.random() < 0.5:
            live.append(waiting.pop(0))
            engine.add(live[-1])
        if live and rng.random() < 0.03:
            engine.abort(rng.choice(live).request_id)
        if (step := engine.step()) is None:
            continue
        for update in step.updates:
            found.setdefault(update.request.request_id, []).extend(update.logprobs)
    ended = [r for r in requests if r.finish_reason is FinishReason.LENGTH]
    for request in ended:
        check(request, found[request.request_id])
    assert len(ended) > 12
    assert all(
        request.finish_reason is FinishReason.ABORT or "as was asked for" in request.error
        for request in requests
        if request not in ended
    )
    assert engine.scheduler.block_manager.num_used_blocks == 0


def chains(rng: random.Random):
    """Drafts, of which some are right for greedy requests."""

    def propose(prompt, position):
        request = make_request("draft", list(prompt), max_tokens=position - len(prompt) + 3)
        right = expected(request)[0][position - len(prompt) :]
        drafted = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in right]
        return Draft.chain(drafted) if rng.random() < 0.7 else None

    return propose


# -- two steps in flight -------------------------------------------------------------------------


def test_steps_overlap_and_who_needs_the_host_slows_nobody():
    engine = make_engine(QueuedStream())
    fed = make_request("fed", [1, 2, 3], max_tokens=12)
    host = make_request("host", [4, 5], max_tokens=12, repetition_penalty=1.3)
    for request in (fed, host):
        engine.add(request)
    ahead = {"fed": 0, "host": 0}
    while (step := engine.step()) is not None:
        for item in step.batch.items:
            ahead[item.request.request_id] += bool(item.request.num_tokens_in_flight)
    check(fed, [])
    check(host, [])
    assert ahead == {"fed": 11, "host": 0}


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_that_is_used_again_too_early_is_a_wrong_answer(waits):
    """So that the stream of these tests is worth something."""
    engine = make_engine(QueuedStream())
    forward = engine.executor.forward
    forward._buffers = forward._buffers[:1]
    if not waits:
        forward._free_buffer = lambda: forward._buffers[0]
    request = make_request("a", [1, 2, 3], max_tokens=12)
    engine.add(request)
    run(engine)
    assert request.output_token_ids != expected(request)[0]


def test_what_somebody_looks_into_is_over_before_the_next_step():
    stream = QueuedStream()
    engine = make_engine(stream, max_num_batched_tokens=8)
    asked = make_request("asked", list(range(20, 39)), max_tokens=5, prompt_logprobs=1)
    other = make_request("other", [7, 8], max_tokens=12)
    for request in (other, asked):
        engine.add(request)
    prompt, ahead = [], 0
    while (step := engine.step()) is not None:
        ahead += asked.num_tokens_in_flight > 0 and asked.num_output_tokens > 0
        for update in step.updates:
            prompt += update.prompt_logprobs
    assert ahead == 4  # from its prompt on it is like any other
    check(asked, [])
    check(other, [])
    assert [entry.token_id for entry in prompt] == asked.prompt_token_ids[1:]
    for position, entry in enumerate(prompt):
        logits = logits_after(asked.prompt_token_ids[: position + 1])
        (right,) = compute_logprobs(logits, [entry.token_id], 1)
        assert entry == right


def test_an_observer_sees_the_logits_of_its_own_step():
    engine = make_engine(QueuedStream())

    class Observer:
        seen: dict[int, torch.Tensor] = {}

        def wants(self, request):
            return range(2, 6)

        def observe(self, request, first, logits):
            for position, row in enumerate(logits, first):
                self.seen[position] = torch.from_numpy(row.copy())

    engine.executor.runner.logits_observer = Observer()
    request = make_request("a", [9, 8, 7, 6, 5, 4, 3])
    engine.add(request)
    run(engine)
    assert [*Observer.seen] == [2, 3, 4, 5]
    for position, logits in Observer.seen.items():
        assert torch.equal(logits, logits_after(request.prompt_token_ids[: position + 1])[0])
    check(request, [])


def test_damage_ends_its_own_request_though_it_ran_ahead():
    engine = make_engine(QueuedStream(), damaged_token=100)
    bad, good = make_request("bad", [1, 100, 2]), make_request("good", [1, 2])
    for request in (bad, good):
        engine.add(request)
    run(engine)
    assert bad.finish_reason is FinishReason.ERROR and "NaN" in bad.error
    assert bad.output_token_ids == []
    check(good, [])


def test_an_abort_in_flight_leaves_nothing_behind():
    engine = make_engine(QueuedStream(), num_blocks=20, max_num_seqs=2)
    requests = [make_request(f"r{i}", [i + 1, 2, 3], max_tokens=9) for i in range(6)]
    for request in requests:
        engine.add(request)
    for step in range(400):
        if not engine.has_unfinished_requests:
            break
        if step % 5 == 4 and engine.scheduler.running:
            assert engine.scheduler.running[0].num_tokens_in_flight  # that is what is tested
            engine.abort(engine.scheduler.running[0].request_id)
        engine.step()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    ended = [r for r in requests if r.finish_reason is FinishReason.LENGTH]
    assert 0 < len(ended) < 6
    for request in ended:
        check(request, [])


# -- graphs --------------------------------------------------------------------------------------


def test_every_shape_is_captured_before_the_first_request():
    stream = QueuedStream()
    engine = make_engine(stream, max_num_seqs=8)
    forward = engine.executor.forward
    shapes = [*forward.graphs.bytes_by_shape]
    assert [shape.num_seqs for shape in shapes if shape.is_decode] == [8, 4, 2, 1]
    assert shapes[0].num_tokens == 2048
    requests = [make_request(f"r{i}", [i + 1, 2, 3], max_tokens=9) for i in range(3)]
    for request in requests:
        engine.add(request)
    run(engine)
    assert stream.num_replays == 9  # the prompts are one step of 9 tokens
    for request in requests:
        check(request, [])


def test_what_a_step_that_raised_has_left_is_undone():
    """Kernels count programs, and the next step would begin in the middle of a count."""
    engine = make_engine(HostStream(), captures=False)
    program = engine.executor.forward.program
    run_step = program.run
    failures = iter([RuntimeError("out of resource: shared memory")])

    def run_or_fail(step) -> None:
        for error in failures:
            raise error
        run_step(step)

    program.run = run_or_fail
    failing, next_one = make_request("a", [3, 4], max_tokens=3), make_request("b", [5, 6])
    for request in (failing, next_one):
        engine.add(request)
        run(engine)
    assert failing.error is not None and program.num_resets == 1
    check(next_one, [])


@pytest.mark.parametrize("captures", [True, False])
def test_steps_are_captured_where_that_is_wanted(captures):
    stream = QueuedStream()
    engine = make_engine(stream, captures=captures)
    request = make_request("a", [3, 4], max_tokens=9)
    engine.add(request)
    run(engine)
    check(request, [])
    assert (stream.num_replays > 0) is captures


def test_no_more_rows_than_seats_become_tokens_at_once(monkeypatch):
    """Drafts have many rows: their logits are made one part after another."""
    monkeypatch.setattr(cuda_forward, "LOGITS_ROWS", 4)
    drafts = FunctionProposer(chains(random.Random(5)))
    engine = make_engine(QueuedStream(), max_num_seqs=3, proposer=drafts)
    kinds = [{}, {"temperature": 0.9, "logprobs": 1}, {"bad_words": ["x"], "logit_bias": {9: 3.0}}]
    requests = [
        make_request(f"r{i}", [i + 1, 2, 3], i, max_tokens=12, **kind)
        for i, kind in enumerate(kinds)
    ]
    for request in requests:
        engine.add(request)
    found = run(engine)
    for request in requests:
        check(request, found[request.request_id])
    assert engine.scheduler.drafts.num_accepted > 5


def test_masks_and_edits_lie_where_copies_need_not_wait_for_them(monkeypatch):
    """In buffers that the stream gave."""
    stream, given, taken = QueuedStream(), [], []
    host_buffer, sample_rows = stream.host_buffer, PlainSampler.sample

    def noted_buffer(count, dtype):
        given.append(host_buffer(count, dtype))
        return given[-1]

    def noted_sample(self, logits, rows, asked, out):
        taken.append((rows.masks, rows.edit_starts, rows.edits))
        sample_rows(self, logits, rows, asked, out)

    stream.host_buffer = noted_buffer
    monkeypatch.setattr(PlainSampler, "sample", noted_sample)
    engine = make_engine(stream)
    request = make_request("a", [1, 2, 3], repetition_penalty=1.3, bad_words=["x"])
    engine.add(request)
    run(engine)
    check(request, [])
    pinned = {each.untyped_storage().data_ptr() for each in given}
    asked = [each for each in taken if each[0] is not None]
    assert len(asked) == len(request.output_token_ids)
    assert all(part.untyped_storage().data_ptr() in pinned for parts in asked for part in parts)
