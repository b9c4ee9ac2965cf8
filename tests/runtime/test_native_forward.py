"""The native step program under the engine: the same answers however a request was run."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from faults import FaultyForward, FaultyScheduler, every
from hash_model import FunctionProposer
from native_requests import make_requests

from octavo.core import lookahead
from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import create_mask
from octavo.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

VARIANTS = {
    "block size 32": {"block_size": 32, "num_blocks": 32},
    "block size 64": {"block_size": 64, "num_blocks": 32},
    "budget 1": {"max_num_batched_tokens": 1},
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 64": {"max_num_batched_tokens": 64},
    "no prefix cache": {"prefix_caching": False},
    "tiny pool": {"num_blocks": 10},
    "tiny pool, no cache": {"num_blocks": 10, "prefix_caching": False},
    "tiny pool, host cache": {"num_blocks": 10, "num_places": 30},
    "three slots": {"max_num_seqs": 3},
    "static": {"static": True, "max_num_seqs": 4},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "two threads": {"threads": 2},
    "three threads": {"threads": 3},
}


@pytest.fixture(scope="module")
def alone(bench, run_all):
    """The answers when every request runs by itself, with nothing cached."""
    engine = bench.engine(kernels="native", prefix_caching=False)
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size), together=False)
    return answers


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(bench, run_all, alone, name):
    engine = bench.engine(kernels="native", **VARIANTS[name])
    answers, steps = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone
    assert max(step.batch.num_seqs for step in steps) > 1 or "budget 1" in name
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


def make_questions(document: list[int]) -> list[Request]:
    return [
        Request(
            f"r{index}",
            document[: 150 if index % 3 else 70] + [index, 5, 6],
            SamplingParams(max_tokens=20, temperature=index % 2, logprobs=2, ignore_eos=True),
            0.0,
            seed=index,
        )
        for index in range(9)
    ]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_prompts_share_is_read_once(bench, run_all, kv_cache_dtype):
    """By requests that decode side by side, with drafts and without; and none of them notices."""
    rng = random.Random(8)
    document = [rng.randrange(2, bench.config.vocab_size) for _ in range(150)]
    settings = {"kernels": "native", "max_model_len": 256, "kv_cache_dtype": kv_cache_dtype}
    engine = bench.engine(**settings, prefix_caching=False)
    alone, _ = run_all(engine, make_questions(document), together=False)
    sampled_draft = FunctionProposer(
        lambda prompt, length: Draft.chain([7, 8]) if length % 3 else None
    )
    for proposer in (None, sampled_draft):
        engine = bench.engine(128, **settings, proposer=proposer)
        run_all(engine, [Request("first", document, SamplingParams(max_tokens=1), 0.0)])
        answers, steps = run_all(engine, make_questions(document))
        assert answers == alone
        assert engine.scheduler.prefix_tokens_hit == 6 * 144 + 3 * 64
        assert sum(step.batch.num_seqs == 9 for step in steps) > 5


def test_what_the_logits_say_of_tokens_changes_none_of_them(bench, run_all):
    """Not under a mask, either, which shows in what is chosen and not in its log-probability."""
    vocab_size = bench.config.vocab_size
    rng = random.Random(3)
    words = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 2]))] for _ in range(60)]
    answers = []
    for logprobs in (None, 0):
        requests = []
        for index in range(8):
            params = SamplingParams(
                max_tokens=24,
                min_tokens=index,
                temperature=index % 2,
                allowed_token_ids=range(index % 4, vocab_size, 3) if index % 3 else None,
                logit_bias=dict.fromkeys(range(index), 4.0),
                logprobs=logprobs,
                ignore_eos=True,
            )
            mask = create_mask(params, vocab_size, range(0, vocab_size, 2), words)
            requests.append(Request(str(index), [5, 6, index], params, 0.0, seed=index, mask=mask))
        found, _ = run_all(bench.engine(kernels="native"), requests)
        answers.append({request_id: tokens for request_id, (tokens, _) in found.items()})
        for request in requests:
            request.mask.rollback(request.mask.num_tokens)
            for token_id in request.output_token_ids:
                bits = request.mask.bitmask()
                assert bits is None or bits[token_id // 32] >> token_id % 32 & 1
                request.mask.advance([token_id])
    assert answers[0] == answers[1]


def test_a_lone_stream_decodes_several_steps_in_one_call(bench, run_all, alone, monkeypatch):
    """Several tokens of one call, and the same ones."""
    monkeypatch.setattr(lookahead, "MULTI_STEP_SECONDS", 3600.0)
    engine = bench.engine(kernels="native", max_multi_steps=lookahead.MAX_MULTI_STEPS)
    requests = make_requests(bench.config.vocab_size)
    answers, steps = run_all(engine, requests, together=False)
    assert answers == alone
    taken = {len(update.new_token_ids) for step in steps for update in step.updates}
    assert lookahead.MAX_MULTI_STEPS in taken
    most_with_logprobs = 0
    for request in requests:
        mine = [len(u.new_token_ids) for s in steps for u in s.updates if u.request is request]
        if request.params.has_penalties or request.is_masked:
            assert max(mine) == 1
        elif request.params.logprobs is not None:
            most_with_logprobs = max(most_with_logprobs, *mine)
    assert most_with_logprobs == lookahead.MAX_MULTI_STEPS


def test_several_requests_take_several_steps_of_one_call(bench, run_all, monkeypatch):
    """Each goes on from its own token, as it would in steps: the same tokens and logprobs."""
    monkeypatch.setattr(lookahead, "MULTI_STEP_SECONDS", 3600.0)
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, top_k=9, ignore_eos=True, logprobs=0),
    ]
    prompts = [[5, 6, 7], [9] * 20, [3, 200]]

    def make() -> list[Request]:
        return [Request(f"r{i}", prompts[i], params[i], 0.0, seed=i) for i in range(3)]

    expected, _ = run_all(bench.engine(kernels="native"), make())
    rank = bench.engine(kernels="native").executor
    requests = make()
    for index, request in enumerate(requests):
        request.block_ids = [2 * index, 2 * index + 1]
    items = [ScheduledRequest(r, 0, len(r.token_ids), 1) for r in requests]
    found = []
    while items:
        found.append(rank.run(Batch(0, tuple(items))))
        for request in requests:
            request.token_ids += found[-1].token_ids[request.request_id]
        most = 9 - requests[0].num_output_tokens
        items = [ScheduledRequest(r, len(r.token_ids) - 1, 1, most) for r in requests if most]
    assert [len(step.token_ids["r0"]) for step in found] == [1, 1, 7]  # the second one is timed
    for request_id, (tokens, logprobs) in expected.items():
        assert sum((step.token_ids[request_id] for step in found), []) == tokens
        assert sum((step.logprobs.get(request_id, []) for step in found), []) == logprobs


def test_a_multi_step_call_takes_as_long_as_it_should(bench, run_all, monkeypatch):
    """Slow models decode token by token: nobody waits longer than for that."""
    engine = bench.engine(kernels="native", max_multi_steps=lookahead.MAX_MULTI_STEPS)
    forward = engine.executor.runner.forward
    forward._decode_seconds = lookahead.MULTI_STEP_SECONDS
    program = forward.program

    run_step = program.step

    def step_slowly(batch, max_seq_len):
        run_step(batch, max_seq_len)
        program.seconds += 0.6 * lookahead.MULTI_STEP_SECONDS * batch.num_multi_steps

    monkeypatch.setattr(program, "step", step_slowly)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    _, steps = run_all(engine, [Request("r", [5, 6, 7], params, 0.0, seed=1)])
    assert all(len(u.new_token_ids) == 1 for step in steps for u in step.updates)


def test_damage_in_a_later_step_ends_the_request_after_its_good_tokens(bench, run_all, monkeypatch):
    monkeypatch.setattr(lookahead, "MULTI_STEP_SECONDS", 3600.0)
    engine = bench.engine(kernels="native", max_multi_steps=lookahead.MAX_MULTI_STEPS)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (good,) = run_all(engine, [Request("r", [5, 6, 7], params, 0.0, seed=1)])[0].values()

    engine = bench.engine(kernels="native", max_multi_steps=lookahead.MAX_MULTI_STEPS)
    program = engine.executor.runner.forward.program
    position = 3 + 1 + 4  # in the middle of the first call of several steps
    program._extend_tables(100)
    arguments, rope = program._tables[0]
    table = rope.make(100)
    assert table.ctypes.data == arguments.cos_sin
    kept = table[position].copy()
    table[position] = float("nan")
    try:
        request = Request("r", [5, 6, 7], params, 0.0, seed=1)
        answers, steps = run_all(engine, [request])
    finally:
        table[position] = kept  # it belongs to the model
    assert request.finish_reason is FinishReason.ERROR and "NaN" in request.error
    assert answers["r"][0] == good[0][: position - 2]
    assert [len(u.new_token_ids) for step in steps for u in step.updates] == [1, 1, 4, 0]


def test_tables_of_positions_that_were_too_short_are_let_go(bench, run_all):
    """They double with the context: all of them together were gigabytes at 128k positions."""
    engine = bench.engine(kernels="native")
    program = engine.executor.runner.forward.program
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first, _ = run_all(engine, [Request("a", [5, 6, 7], params, 0.0, seed=1)])
    seen = []
    for _ in range(3):
        seen.append(weakref.ref(program._cos_sin[0]))
        program._extend_tables(program._num_positions + 1)
    assert program._num_positions > 3 * 1024
    gc.collect()
    assert [old() for old in seen] == [None] * 3
    second, _ = run_all(engine, [Request("a", [5, 6, 7], params, 0.0, seed=1)])
    assert first == second


def test_preemption_every_third_step_changes_nothing(bench, run_all, alone):
    engine = bench.engine(kernels="native")
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone


@pytest.mark.parametrize("isa", library.runnable())
def test_every_instruction_set_runs_alike_in_any_company(bench, run_all, monkeypatch, isa):
    monkeypatch.setenv("OCTAVO_ISA", isa)
    requests = [make_requests(bench.config.vocab_size, count=5) for _ in range(2)]
    first, _ = run_all(bench.engine(kernels="native", threads=1), requests[0], together=False)
    engine = bench.engine(kernels="native", threads=2, max_num_batched_tokens=33)
    second, _ = run_all(engine, requests[1])
    assert first == second


def test_answers_are_those_of_the_reference(bench, run_all):
    """With keys and values in float32, but for the order of sums."""
    engine = bench.engine(kernels="native", kv_cache_dtype="f32")
    native, _ = run_all(engine, make_requests(bench.config.vocab_size))
    reference, _ = run_all(bench.engine(), make_requests(bench.config.vocab_size))
    assert {r: tokens for r, (tokens, _) in native.items()} == {
        r: tokens for r, (tokens, _) in reference.items()
    }
    for request_id, (_, entries) in reference.items():
        for ours, theirs in zip(native[request_id][1], entries, strict=True):
            assert abs(ours.logprob - theirs.logprob) < 1e-3


@pytest.mark.parametrize(
    "kv, most, memory",
    [("int8", 0.1, 0.35), ("fp8", 0.3, 0.35), ("k8v4", 0.5, 0.3), ("int4", 1.0, 0.25)],
)
def test_keys_and_values_with_scales(bench, run_all, kv, most, memory):
    """In any company the same to the last bit, and near what float32 gives."""
    engine = bench.engine(kernels="native", kv_cache_dtype=kv, prefix_caching=False)
    alone, _ = run_all(engine, make_requests(bench.config.vocab_size), together=False)
    engine = bench.engine(kernels="native", kv_cache_dtype=kv, num_blocks=10)
    together, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert together == alone and engine.scheduler.num_preemptions > 0

    exact = bench.engine(kernels="native", kv_cache_dtype="f32")
    exact_answers, _ = run_all(exact, make_requests(bench.config.vocab_size))
    differences = [
        abs(ours.logprob - theirs.logprob)
        for request_id, (_, entries) in exact_answers.items()
        for ours, theirs in zip(alone[request_id][1][:1], entries[:1], strict=True)
    ]
    mean = sum(differences) / len(differences)
    print(mean)
    assert 0 < mean < most
    kv_bytes = [e.executor.probe().kv_bytes_per_token for e in (engine, exact)]
    assert kv_bytes[0] < memory * kv_bytes[1]


def test_damaged_rows_end_their_requests_alone(bench, run_all, alone):
    engine = bench.engine(kernels="native")
    requests = make_requests(bench.config.vocab_size)
    runner = engine.executor.runner
    runner.forward = FaultyForward(runner.forward, damages=every(9))
    answers, _ = run_all(engine, requests)
    ended = [r for r in requests if r.finish_reason is FinishReason.ERROR]
    assert 0 < len(ended) < len(requests)
    assert all("NaN" in request.error for request in ended)
    for request in requests:
        if request not in ended:
            assert answers[request.request_id] == alone[request.request_id]


@pytest.mark.timing  # the other thread has to have a turn while a short step runs
def test_a_step_that_is_aborted_fails_and_the_next_runs(bench, run_all, alone):
    import threading

    engine = bench.engine(kernels="native", threads=2)
    pool = engine.executor.runner.forward.program.pool
    stop = threading.Event()

    def abort_all_the_time() -> None:
        while not stop.is_set():
            pool.abort()

    thread = threading.Thread(target=abort_all_the_time)
    thread.start()
    requests = make_requests(bench.config.vocab_size, count=3)
    try:
        for request in requests:
            engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
    finally:
        stop.set()
        thread.join()
    errors = [request.error for request in requests if request.error]
    assert errors and all("aborted" in error for error in errors)
    engine.scheduler.block_manager.check_integrity([])
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone


def test_two_engines_take_turns(bench, run_all, alone):
    engines = [bench.engine(kernels="native") for _ in range(2)]
    for engine in engines:
        for request in make_requests(bench.config.vocab_size):
            engine.add(request)
    tokens: list[dict[str, list[int]]] = [{}, {}]
    while any(engine.has_unfinished_requests for engine in engines):
        for engine, found in zip(engines, tokens, strict=True):
            if (step := engine.step()) is not None:
                for update in step.updates:
                    found.setdefault(update.request.request_id, []).extend(update.new_token_ids)
    expected = {request_id: answer[0] for request_id, answer in alone.items()}
    assert tokens == [expected, expected]
