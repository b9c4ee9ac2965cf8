"""Ranks with sequences of their own give the answers of one rank, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from faults import FaultyScheduler, every
from fused_models import CONFIGS, random_model
from hash_model import FunctionProposer
from native_requests import make_requests, short_requests
from rank_threads import lone_follower, num_refused

from octavo.base.errors import EngineError
from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library
from octavo.kernels.division import Division
from octavo.kernels.expert_places import ExpertPlaces, deal_out
from octavo.kernels.fused_ops import CannotFuse, FusedLatentAttention, FusedLinear
from octavo.kernels.parts import Part
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import plan_step
from octavo.runtime.step_words import COPY, HAS_OWNERS, STEP, BadMessage, StepHeader

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

FAMILIES = ("deepseek 2", "deepseek 3")
CONFIG = CONFIGS["deepseek 3"]


@pytest.fixture(scope="module")
def latents(bench_of):
    return bench_of(random_model(CONFIG), CONFIG)


@pytest.fixture(scope="module")
def alone(latents, run_all):
    """The answers of one rank when every request runs by itself, by the type of its KV."""

    def answers(kind):
        engine = latents.engine(kernels="native", prefix_caching=False, kv_cache_dtype=kind)
        return run_all(engine, make_requests(CONFIG.vocab_size), together=False)[0]

    return {kind: answers(kind) for kind in ("auto", "int8")}


def with_own_sequences(bench, tp=2, **settings):
    return bench.engine(kernels="native", tp=tp, dp_attention=True, **settings)


def owners(steps):
    """The pools of the requests that were computed."""
    return {item.request.pool for step in steps for item in step.batch.items}


def check_followers(engine):
    assert engine.executor.failures_of_followers == []
    assert engine.executor.spec.group.counts.meetings > 0


VARIANTS = {
    "two ranks": {},
    "three ranks": {"tp": 3},
    "more ranks than heads": {"tp": 5},
    "two ranks of two threads": {"threads": 2},
    "budget 7": {"max_num_batched_tokens": 7},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "tiny pools": {"num_blocks": 8},
    "no prefix cache": {"prefix_caching": False},
    "several steps in one call": {"max_multi_steps": 4},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_one_rank(latents, run_all, alone, name):
    settings = VARIANTS[name]
    engine = with_own_sequences(latents, **settings)
    answers, steps = run_all(engine, make_requests(CONFIG.vocab_size))
    check_followers(engine)
    assert answers == alone[settings.get("kv_cache_dtype", "auto")]
    assert owners(steps) == set(range(settings.get("tp", 2)))
    if name == "tiny pools":
        assert engine.scheduler.num_preemptions > 0


def test_a_request_alone_leaves_the_other_rank_without_attention(latents, run_all, alone):
    """Each by itself: the other rank, or rank 0, has no sequence in any of its steps."""
    engine = with_own_sequences(latents, prefix_caching=False, max_multi_steps=4)
    answers, steps = run_all(engine, make_requests(CONFIG.vocab_size), together=False)
    check_followers(engine)
    assert answers == alone["auto"]
    assert all(len({item.request.pool for item in step.batch.items}) == 1 for step in steps)


def test_whichever_rank_has_a_sequence(latents, run_all, alone):
    """Rank 0 has none at all, and samples for the other."""
    engine = with_own_sequences(latents)
    pools = engine.scheduler.block_manager

    def to_the_last(request, running, shared_of):
        request.pool = 1
        return shared_of(request)

    pools.place = to_the_last
    answers, steps = run_all(engine, make_requests(CONFIG.vocab_size))
    check_followers(engine)
    assert answers == alone["auto"]
    assert owners(steps) == {1}
    assert pools.pools[0].num_free_blocks == 64


def test_preemptions_change_nothing(latents, run_all, alone):
    engine = with_own_sequences(latents)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(CONFIG.vocab_size))
    check_followers(engine)
    assert answers == alone["auto"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_drafts_change_nothing(latents, run_all, is_tree):
    """KV of an accepted branch is moved in the rank that has the sequence."""
    requests = short_requests(CONFIG.vocab_size, max_tokens=20)
    expected, _ = run_all(latents.engine(kernels="native"), requests)
    whole = [[*request.prompt_token_ids, *expected[request.request_id][0]] for request in requests]

    def propose(prompt: list[int], length: int) -> Draft | None:
        known = next(tokens for tokens in whole if tokens[: len(prompt)] == list(prompt))
        right = tuple(known[length : length + 3])
        if len(right) < 3:
            return None
        wrong = (right[0] + 1) % CONFIG.vocab_size
        return Draft((wrong, *right), (-1, -1, 1, 2)) if is_tree else Draft.chain((*right, wrong))

    engine = with_own_sequences(latents, proposer=FunctionProposer(propose, 3))
    answers, steps = run_all(engine, short_requests(CONFIG.vocab_size, max_tokens=20))
    check_followers(engine)
    assert answers == expected
    drafted = [item for step in steps for item in step.batch.items if item.draft is not None]
    assert {item.request.pool for item in drafted} == {0, 1}


def samples_of(prompt, count):
    """Samples of one prompt, which share its KV."""
    params = SamplingParams(max_tokens=24, temperature=1.0, logprobs=1, ignore_eos=True)
    first = Request("s0", prompt, params, 0.0, seed=3)
    others = (
        Request(f"s{i}", prompt, params, 0.0, seed=3, sample_index=i, fork_of=first)
        for i in range(1, count)
    )
    return [first, *others]


def test_samples_of_a_prompt_share_its_blocks_in_one_pool(latents, run_all):
    prompt = [5 + 3 * i % 50 for i in range(37)]
    expected, _ = run_all(latents.engine(kernels="native"), samples_of(prompt, 4))
    engine = with_own_sequences(latents)
    answers, steps = run_all(engine, samples_of(prompt, 4))
    check_followers(engine)
    assert answers == expected
    assert owners(steps) == {0}
    assert any(step.batch.block_copies for step in steps)  # the last block, before it is written


def test_copies_are_made_in_the_pool_of_the_samples(latents, run_all):
    """Rank 1 copies a block that samples share, beside a long request of rank 0."""
    prompt = [5 + 3 * i % 50 for i in range(37)]
    params = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
    long = [7 + i % 50 for i in range(100)]

    def requests():
        return [Request("long", long, params, 0.0), *samples_of(prompt, 3)]

    expected, _ = run_all(latents.engine(kernels="native"), requests())
    engine = with_own_sequences(latents)
    answers, steps = run_all(engine, requests())
    check_followers(engine)
    assert answers == expected
    copies = [copy for step in steps for copy in step.batch.block_copies]
    assert copies
    assert all(min(copy) >= 64 for copy in copies)


def test_a_prefix_is_found_where_it_is_cached(latents, run_all):
    """The next request with a prompt goes to the rank that has its prefix."""
    engine = with_own_sequences(latents)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    long = [7 + i % 50 for i in range(100)]
    answers = {}
    for index in range(2):
        # Two at once go to two ranks; of the second round, each to the one that has its prompt.
        requests = [
            Request(f"{index} {name}", prompt, params, 0.0)
            for name, prompt in (("a", long), ("b", long[::-1]))[:: -1 if index else 1]
        ]
        got, steps = run_all(engine, requests)
        answers |= got
        by_name = {
            item.request.request_id[-1]: item.request for s in steps for item in s.batch.items
        }
        assert [by_name["a"].pool, by_name["b"].pool] == [0, 1]
        assert by_name["a"].stats.num_cached_tokens == by_name["b"].stats.num_cached_tokens
        assert by_name["a"].stats.num_cached_tokens == (96 if index else 0)
    assert answers["0 a"] == answers["1 a"]
    assert answers["0 b"] == answers["1 b"]


# -- messages -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(latents, run_all):
    """The messages of a run with all kinds of steps, and copies of blocks."""
    messages: list[np.ndarray] = []
    engine = with_own_sequences(latents)
    forward = engine.executor.forward
    group = forward._messages

    class Kept:
        def send(self, words):
            messages.append(np.array(words, dtype=np.int32))
            group.send(words)

    forward._messages = forward.kv_cache._messages = Kept()
    run_all(engine, [*make_requests(CONFIG.vocab_size), *samples_of([5, 6, 7], 3)])
    assert {int(message[0]) for message in messages} >= {STEP, COPY}
    return messages


OWNERS = 1 + StepHeader._fields.index("flags")


def test_a_step_has_to_say_whose_its_sequences_are(latents, sent):
    follower = lone_follower(with_own_sequences(latents).executor, latents.model, CONFIG)
    by_heads = lone_follower(latents.engine(kernels="native", tp=2).executor, latents.model, CONFIG)
    message = next(each for each in sent if each[0] == STEP)
    with pytest.raises(BadMessage, match="where attention is divided by heads"):
        by_heads.obey(message)
    without = message.copy()
    without[OWNERS] &= ~HAS_OWNERS
    with pytest.raises(BadMessage, match="does not say whose"):
        follower.obey(without)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_messages_are_refused_or_harmless(latents, sent, seed):
    """Cut, and with other numbers in them: none reads or writes beyond an array."""
    engine = with_own_sequences(latents)
    follower = lone_follower(engine.executor, latents.model, CONFIG)
    assert num_refused(follower, sent, seed) > 50


@pytest.mark.parametrize("owned", [(0, 9), (3, 1), (-1, 1), (2, -1)])
def test_own_rows_lie_within_the_step(latents, run_all, owned):
    """As the kernels check again what a follower has checked."""
    engine = latents.engine(kernels="native")
    run_all(engine, short_requests(CONFIG.vocab_size, count=2))
    forward = engine.executor.forward
    forward._arguments.first_own_seq, forward._arguments.num_own_seqs = owned
    with pytest.raises(EngineError, match="sequences from .* on are the rank's own"):
        forward._step(0)


# -- families, experts and formats ----------------------------------------------------------------


def check_alike(bench, run_all, sizes, experts=lambda size: None, **settings):
    settings = {"max_model_len": 64, **settings}
    expected, _ = run_all(
        bench.engine(kernels="native", **settings), short_requests(bench.config.vocab_size)
    )
    for size in sizes:
        engine = with_own_sequences(bench, tp=size, experts=experts(size), **settings)
        answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
        check_followers(engine)
        assert answers == expected, f"{size} ranks"


@pytest.mark.parametrize("name", FAMILIES)
def test_families(bench_of, run_all, name):
    config = CONFIGS[name]
    check_alike(bench_of(random_model(config), config), run_all, (2, 3, 4))


@pytest.mark.parametrize("name", FAMILIES)
def test_with_whole_experts_on_ranks(bench_of, run_all, name):
    config = CONFIGS[name]

    def experts(size):
        layer = deal_out(config.experts.routing.num_experts, size)
        return ExpertPlaces((layer,) * sum(config.experts.layers))

    check_alike(bench_of(random_model(config), config), run_all, (2, 3), experts)


@pytest.mark.parametrize("activations", ["mixed", "int8"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_formats(bench_of, run_all, type, activations):
    latent = replace(CONFIG.latent, kv_rank=64, q_rank=64)
    config = replace(CONFIG, hidden_size=64, intermediate_size=96, latent=latent)
    config = replace(config, experts=replace(config.experts, inner=32, shared_inner=32))
    bench = bench_of(random_model(config, GGMLType[type]), config)
    check_alike(bench, run_all, (2,), activations=activations)


@pytest.mark.parametrize("kv", ["float32", "bf16", "int8", "fp8"])
def test_types_of_kv(latents, run_all, kv):
    check_alike(latents, run_all, (2,), kv_cache_dtype=kv)


# -- what is divided ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_has_its_matrices_whole_and_two_meetings_less(name):
    plan, _ = plan_step(random_model(CONFIGS[name]))
    by_heads, by_sequences = (
        Division(plan.ops, Part(1, 2, by_sequences=is_so)) for is_so in (False, True)
    )
    num_layers = sum(isinstance(op, FusedLatentAttention) for op in plan.ops)
    own = [op for op in plan.ops if by_sequences.has_own_rows(op)]
    assert not any(map(by_heads.has_own_rows, plan.ops))
    assert len(own) == num_layers * (3 if CONFIGS[name].latent.q_rank is None else 4)
    for op in own:
        if isinstance(op, FusedLinear):
            rows = (by_sequences.rows(op, i) for i in range(len(op.segments)))
            assert list(rows) == [range(s.weight.shape[0]) for s in op.segments]
    met = [
        sum(division.meets(op) for op in plan.ops if op is not plan.ops[-1])
        for division in (by_heads, by_sequences)
    ]
    assert met[1] == met[0] - 2 * num_layers


def test_attention_over_keys_and_values_is_not_divided_by_sequences():
    plan, _ = plan_step(random_model(CONFIGS["llama"]))
    with pytest.raises(CannotFuse, match="only attention over latent vectors"):
        Division(plan.ops, Part(0, 2, by_sequences=True))
