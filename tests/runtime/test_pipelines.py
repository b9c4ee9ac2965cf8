"""Pipelines, also of tensor-parallel groups, give the answers of one rank, to the last bit."""

from __future__ import annotations

import pytest
from faults import FaultyScheduler, every
from fused_models import CONFIGS, deeper, random_model
from hash_model import FunctionProposer
from hybrid_models import RECURRENCES, make_hybrid
from native_requests import make_requests, short_requests, sink_requests

from octavo.base.errors import PeerEndedError
from octavo.core.batch import Draft
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindowRules
from octavo.kernels.cpu import library
from octavo.kernels.cpu.group import ShmGroup
from octavo.models.kv_groups import group_layers
from octavo.runtime.stage_forward import StageEnds, StageForward

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

LAYOUTS = {
    "two stages": {"pp": 2},
    "two stages of two ranks": {"pp": 2, "tp": 2},
    "two stages of three ranks": {"pp": 2, "tp": 3},
    "two stages of two threads": {"pp": 2, "threads": 2},
    "budget 7": {"pp": 2, "max_num_batched_tokens": 7},
    "budget 64": {"pp": 2, "max_num_batched_tokens": 64},
    "int8 KV": {"pp": 2, "kv_cache_dtype": "int8"},
    "tiny pool": {"pp": 2, "num_blocks": 10},
    "tiny pool, two ranks": {"pp": 2, "tp": 2, "num_blocks": 10},
    "tiny pool, host cache": {"pp": 2, "num_blocks": 10, "num_places": 30},
}


@pytest.fixture(scope="module")
def alone(bench, run_all):
    """The answers of one rank when every request runs by itself, by the type of its KV."""

    def answers(kind):
        engine = bench.engine(kernels="native", prefix_caching=False, kv_cache_dtype=kind)
        return run_all(engine, make_requests(bench.config.vocab_size), together=False)[0]

    return {kind: answers(kind) for kind in ("auto", "int8")}


def check_followers(engine):
    assert engine.executor.failures_of_followers == []
    assert engine.executor.depth == engine.executor.spec.stage.count


@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_are_those_of_one_rank(bench, run_all, alone, name):
    settings = LAYOUTS[name]
    engine = bench.engine(kernels="native", **settings)
    answers, steps = run_all(engine, make_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == alone[settings.get("kv_cache_dtype", "auto")]
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


def test_preemptions_change_nothing(bench, run_all, alone):
    engine = bench.engine(kernels="native", pp=2)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == alone["auto"]


# -- families, of more layers than stages ----------------------------------------------------------


@pytest.mark.thinned(1)
@pytest.mark.parametrize("layout", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (1, 5)])
@pytest.mark.parametrize("name", CONFIGS)
def test_families(bench_of, run_all, name, layout):
    config = deeper(CONFIGS[name], 5)
    bench = bench_of(random_model(config), config)
    check_alike(bench, run_all, [layout])


def check_alike(bench, run_all, layouts, **settings):
    settings = {"kernels": "native", "max_model_len": 64, **settings}
    expected, _ = run_all(bench.engine(**settings), short_requests(bench.config.vocab_size))
    for tp, pp in layouts:
        engine = bench.engine(tp=tp, pp=pp, **settings)
        answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
        check_followers(engine)
        assert answers == expected, f"tp {tp}, pp {pp}"


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrent_layers(bench_of, run_all, name):
    bench = bench_of(*make_hybrid(name))
    check_alike(bench, run_all, [(1, 2), (2, 2)], state_slots=24, num_blocks=24)


# -- drafts, tables of windows, windows of requests ------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("is_tree", [False, True])
def test_drafts_change_nothing(bench, run_all, is_tree, tp):
    """Right ones behind wrong ones: KV of an accepted branch is moved in all stages."""
    requests = short_requests(bench.config.vocab_size, max_tokens=20)
    expected, _ = run_all(bench.engine(kernels="native"), requests)
    whole = [[*request.prompt_token_ids, *expected[request.request_id][0]] for request in requests]

    def propose(prompt: list[int], length: int) -> Draft | None:
        known = next(tokens for tokens in whole if tokens[: len(prompt)] == list(prompt))
        right = tuple(known[length : length + 3])
        if len(right) < 3:
            return None
        wrong = (right[0] + 1) % bench.config.vocab_size
        return Draft((wrong, *right), (-1, -1, 1, 2)) if is_tree else Draft.chain((*right, wrong))

    engine = bench.engine(kernels="native", pp=2, tp=tp, proposer=FunctionProposer(propose, 3))
    answers, steps = run_all(engine, short_requests(bench.config.vocab_size, max_tokens=20))
    check_followers(engine)
    assert answers == expected
    assert any(item.draft is not None for step in steps for item in step.batch.items)


@pytest.mark.parametrize("pp", [2, 3])
def test_layers_of_windows_have_tables_of_their_own(bench_of, run_all, pp):
    config = deeper(CONFIGS["gemma 3"], 6)
    bench = bench_of(random_model(config), config)
    groups = group_layers(config.kv_layers, pp)
    assert groups.num_groups > 1
    check_alike(bench, run_all, [(1, pp), (2, pp)], groups=groups)


def test_requests_with_sinks_and_a_window(bench, run_all):
    sizes = {"max_model_len": 256, "num_blocks": 128, "sink_windows": SinkWindowRules()}
    expected, _ = run_all(bench.engine(kernels="native", **sizes), sink_requests())
    engine = bench.engine(kernels="native", pp=2, **sizes)
    answers, _ = run_all(engine, sink_requests())
    check_followers(engine)
    assert answers == expected


# -- steps in flight -------------------------------------------------------------------------------


def test_as_many_steps_are_in_flight_as_there_are_stages(bench, run_all):
    engine = bench.engine(kernels="native", pp=2)
    for request in short_requests(bench.config.vocab_size):
        engine.add(request)
    for _ in range(3):
        engine.step()  # all prompts fit into the first one
    assert engine.begin_step()
    first, second = (submitted.batch for submitted in engine._submitted)
    assert not {item.request for item in first.items} & {item.request for item in second.items}
    while engine.step() is not None:
        pass
    check_followers(engine)


# -- steps that fail -------------------------------------------------------------------------------


def fail_in_the_first_stage(monkeypatch, fails):
    """Have the steps of the first stage fail for which ``fails(token_ids, requests)`` is true."""
    step = StageForward._step

    def failing(self, num_positions):
        sequences = self._arguments.seqs
        token_ids = list(self._token_ids[: sequences.num_tokens])
        if self._stage.is_first and fails(token_ids, sequences.num_seqs):
            raise MemoryError("no memory for this step")
        return step(self, num_positions)

    monkeypatch.setattr(StageForward, "_step", failing)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
def test_a_step_that_fails_in_a_stage_is_run_again(bench_of, run_all, monkeypatch, tp, pp):
    """And a request of which every step fails ends alone, in the words of the stage."""
    config = deeper(CONFIGS["llama"], 4)
    bench = bench_of(random_model(config), config)
    settings = {"kernels": "native", "max_model_len": 64}
    requests = short_requests(config.vocab_size, count=8)
    expected, _ = run_all(bench.engine(**settings), requests)
    poison = 1  # a token that no request has: see short_requests
    bad = Request("bad", [5, poison], SamplingParams(max_tokens=4), 0.0)
    engine = bench.engine(tp=tp, pp=pp, **settings)
    count = iter(range(1000))
    fail_in_the_first_stage(
        monkeypatch,
        lambda tokens, n: poison in tokens or (tp == 1 and n > 1 and next(count) % 5 == 3),
    )
    answers, _ = run_all(engine, [*short_requests(config.vocab_size, count=8), bad])
    check_followers(engine)
    assert {name: answers[name] for name in expected} == expected
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error.endswith(f"stage 0 of {pp}: MemoryError: no memory for this step")


def test_an_interrupted_wait_loses_no_step(bench, run_all, monkeypatch):
    """Ctrl-C while the home rank waits, in every third step."""
    expected, _ = run_all(bench.engine(kernels="native"), short_requests(bench.config.vocab_size))
    engine = bench.engine(kernels="native", pp=2)
    take, count = StageEnds.take, iter(range(1000))

    def interrupted(self, number, num_tokens):
        if self._is_last and next(count) % 3 == 1:
            raise KeyboardInterrupt
        take(self, number, num_tokens)

    monkeypatch.setattr(StageEnds, "take", interrupted)
    step, num_interrupted = engine.step, 0

    def stubborn():
        nonlocal num_interrupted
        while True:
            try:
                return step()
            except KeyboardInterrupt:
                num_interrupted += 1

    engine.step = stubborn
    answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == expected and num_interrupted > 3


def test_messages_that_do_not_fit_into_the_ring_wait_for_steps(bench, run_all, monkeypatch):
    """The home rank runs what it has in flight before it waits for those who read."""
    expected, _ = run_all(bench.engine(kernels="native"), short_requests(bench.config.vocab_size))
    engine = bench.engine(kernels="native", pp=2, tp=2)
    monkeypatch.setattr(ShmGroup, "room", 1)
    answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == expected


def test_ranks_that_are_not_in_step_end(bench, run_all, monkeypatch):
    engine = bench.engine(kernels="native", pp=2)
    engine.executor.forward._num_steps = 5  # of which the home rank waits for
    lane = engine.executor.forward._lanes[1]
    write = lane.write
    monkeypatch.setattr(lane, "write", lambda *a: (write(*a), setattr(lane, "step_number", 7))[0])
    with pytest.raises(PeerEndedError, match="step 7, .* are of .step, tokens. .5, "):
        run_all(engine, short_requests(bench.config.vocab_size))
