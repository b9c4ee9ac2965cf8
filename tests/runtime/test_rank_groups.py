"""Ranks of a tensor-parallel group give the answers of one rank, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faults import FaultyScheduler, every
from fused_models import CONFIGS, LLAMA, random_model
from hash_model import FunctionProposer
from hybrid_models import RECURRENCES, make_hybrid
from native_requests import make_requests, short_requests, sink_requests

from octavo.core.batch import Draft
from octavo.core.sink_window import SinkWindowRules
from octavo.kernels.cpu import library
from octavo.kernels.expert_places import ExpertPlaces, deal_out
from octavo.kernels.parts import Part
from octavo.layers.rope_config import RopeConfig
from octavo.models.kv_groups import group_layers
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import plan_step

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

VARIANTS = {
    "two ranks": {"tp": 2},
    "three ranks": {"tp": 3},
    "two ranks of two threads": {"tp": 2, "threads": 2},
    "budget 7": {"tp": 2, "max_num_batched_tokens": 7},
    "budget 64": {"tp": 2, "max_num_batched_tokens": 64},
    "int8 KV": {"tp": 2, "kv_cache_dtype": "int8"},
    "tiny pool": {"tp": 2, "num_blocks": 10},
    "tiny pool, host cache": {"tp": 2, "num_blocks": 10, "num_places": 30},
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
    assert engine.executor.spec.group.counts.meetings > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_one_rank(bench, run_all, alone, name):
    settings = VARIANTS[name]
    engine = bench.engine(kernels="native", **settings)
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == alone[settings.get("kv_cache_dtype", "auto")]
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


def test_preemptions_change_nothing(bench, run_all, alone):
    engine = bench.engine(kernels="native", tp=2)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    check_followers(engine)
    assert answers == alone["auto"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_drafts_change_nothing(bench, run_all, is_tree):
    """Right ones behind wrong ones: KV of an accepted branch is moved in all ranks."""
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

    engine = bench.engine(kernels="native", tp=2, proposer=FunctionProposer(propose, 3))
    answers, steps = run_all(engine, short_requests(bench.config.vocab_size, max_tokens=20))
    check_followers(engine)
    assert answers == expected
    assert any(item.draft is not None for step in steps for item in step.batch.items)


# -- families -------------------------------------------------------------------------------------


def check_alike(bench, run_all, sizes, **settings):
    settings = {"kernels": "native", "max_model_len": 64, **settings}
    expected, _ = run_all(bench.engine(**settings), short_requests(bench.config.vocab_size))
    for size in sizes:
        engine = bench.engine(tp=size, **settings)
        answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
        check_followers(engine)
        assert answers == expected, f"{size} ranks"


@pytest.mark.parametrize("name", CONFIGS)
def test_families(bench_of, run_all, name):
    config = CONFIGS[name]
    check_alike(bench_of(random_model(config), config), run_all, (2, 3, 4))


# -- formats, and heads that do not divide --------------------------------------------------------

WIDE = replace(
    LLAMA,
    hidden_size=256,
    intermediate_size=512,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    vocab_size=160,
    rope=RopeConfig(1000.0, 32),
    attention_scale=32**-0.5,
)
TYPES = ("F32", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL")
SUPERBLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("activations", ["mixed", "int8"])
@pytest.mark.parametrize("type", TYPES)
def test_formats(bench_of, run_all, type, activations):
    config = WIDE
    bench = bench_of(random_model(config, GGMLType[type]), config)
    check_alike(bench, run_all, (2, 3, 8), activations=activations)


@pytest.mark.parametrize("type", SUPERBLOCKS)
def test_superblocks(bench_of, run_all, type):
    config = replace(WIDE, num_heads=8, num_kv_heads=2)
    bench = bench_of(random_model(config, GGMLType[type]), config)
    check_alike(bench, run_all, (2, 3, 4))


@pytest.mark.parametrize("kv", ["float32", "int8", "fp8", "int4", "k8v4"])
def test_types_of_kv(bench_of, run_all, kv):
    bench = bench_of(random_model(WIDE), WIDE)
    check_alike(bench, run_all, (2, 5), kv_cache_dtype=kv)


# -- whole experts on ranks -----------------------------------------------------------------------

MIXTURES = {name: config for name, config in CONFIGS.items() if config.experts is not None}


def places_of(config, size, has_copies=False):
    """Equal runs of experts; or with copies of every other one on the next rank."""
    layer = deal_out(config.experts.routing.num_experts, size)
    if has_copies:
        layer = tuple(
            tuple(sorted({*ranks, (e + 1) % size})) if e % 2 else ranks
            for e, ranks in enumerate(layer)
        )
    return ExpertPlaces((layer,) * sum(config.experts.layers))


def check_experts_alike(bench, run_all, sizes, **settings):
    config = bench.config
    settings = {"kernels": "native", "max_model_len": 64, **settings}
    expected, _ = run_all(bench.engine(**settings), short_requests(config.vocab_size))
    for size in sizes:
        for has_copies in (False, True):
            places = places_of(config, size, has_copies)
            engine = bench.engine(tp=size, experts=places, **settings)
            answers, _ = run_all(engine, short_requests(config.vocab_size))
            check_followers(engine)
            assert answers == expected, f"{size} ranks, with copies: {has_copies}"


@pytest.mark.parametrize("name", MIXTURES)
def test_whole_experts_on_ranks(bench_of, run_all, name):
    config = MIXTURES[name]
    check_experts_alike(bench_of(random_model(config), config), run_all, (2, 3))


@pytest.mark.parametrize("type", [*TYPES, *SUPERBLOCKS])
def test_whole_experts_of_any_format(bench_of, run_all, type):
    config = replace(MIXTURES["mixtral"], hidden_size=256, num_heads=8, head_dim=32)
    config = replace(
        config,
        experts=replace(config.experts, inner=256),
        rope=RopeConfig(1000.0, 32),
        attention_scale=32**-0.5,
    )
    bench = bench_of(random_model(config, GGMLType[type]), config)
    check_experts_alike(bench, run_all, (2,))


def test_whole_experts_in_long_steps_and_of_several_threads(bench_of, run_all):
    config = MIXTURES["mixtral"]
    bench = bench_of(random_model(config), config)
    check_experts_alike(bench, run_all, (2,), threads=2, max_num_batched_tokens=64)


def test_whole_experts_in_stages_of_a_pipeline(bench_of, run_all):
    """Of the layers of a stage alone, whose experts lie otherwise than those of the other."""
    config = MIXTURES["mixtral"]
    bench = bench_of(random_model(config), config)
    expected, _ = run_all(
        bench.engine(kernels="native", max_model_len=64), short_requests(config.vocab_size)
    )
    layer = deal_out(config.experts.routing.num_experts, 2)
    places = ExpertPlaces((layer, layer[::-1]))
    engine = bench.engine(kernels="native", max_model_len=64, tp=2, pp=2, experts=places)
    answers, _ = run_all(engine, short_requests(config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert answers == expected


def test_a_rank_packs_its_own_experts_alone():
    config = MIXTURES["mixtral"]
    plan, weights = plan_step(random_model(config))
    places = places_of(config, 2)
    halves = [plan.rows_of(Part(rank, 2, places)) for rank in (0, 1)]
    names = [name for name in weights if ".experts." in name]
    assert len(names) == 3 * sum(len(layer) for layer in places.layers)
    for name in names:
        rows = [half[name] for half in halves]
        assert sorted(map(len, rows)) == [0, weights[name].shape[0]], name
    for rank in (0, 1):
        assert sum(len(halves[rank][name]) > 0 for name in names) == 3 * places.num_here(rank)


def test_all_ranks_count_all_tokens_of_experts(bench_of, run_all):
    config = MIXTURES["mixtral"]
    bench = bench_of(random_model(config), config)
    places = places_of(config, 2)
    counted = []
    for more in ({}, {"tp": 2, "experts": places}):
        engine = bench.engine(kernels="native", max_model_len=64, **more)
        run_all(engine, short_requests(config.vocab_size))
        probe = engine.executor.probe()
        counted.append(([layer.tolist() for layer in probe.expert_loads()], probe.expert_figures()))
    (loads, alone), (others, shared) = counted
    assert loads == others
    assert sum(map(sum, loads)) > 0
    assert not any(alone[name] for name in alone if "rank" in name)
    of_ranks = [
        sum(
            count
            for layer, places_of_layer in zip(loads, places.layers, strict=True)
            for count, ranks in zip(layer, places_of_layer, strict=True)
            if ranks == (rank,)
        )
        for rank in (0, 1)
    ]
    assert list(shared["expert_rank_tokens"]) == of_ranks
    busiest = shared["expert_busiest_rank_tokens"]
    assert len(busiest) == len(loads)
    for rows, layer in zip(busiest, loads, strict=True):
        assert sum(layer) / 2 <= rows <= sum(layer)


# -- recurrent layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrent_layers(bench_of, run_all, name):
    bench = bench_of(*make_hybrid(name))
    check_alike(bench, run_all, (2, 3, 4), state_slots=12, num_blocks=12)


def test_floats_in_memory_are_packed_in_part():
    """A rank packs the rows that it reads of a model whose packed weights are in no file."""
    model = random_model(WIDE)
    plan, weights = plan_step(model)
    everything, halves = plan.rows_of(Part()), [plan.rows_of(Part(rank, 2)) for rank in (0, 1)]
    whole = {name: range(weight.shape[0]) for name, weight in weights.items()}
    assert everything == whole
    for name, rows in whole.items():
        read = [row for half in halves for row in half[name]]
        if name == "model.embed_tokens.weight":
            assert read == [*rows, *rows]
        else:
            assert set(read) == set(rows)
            assert len(read) < 1.4 * len(rows)  # KV heads that both ranks read are in both


# -- tables of windows, and windows of requests ---------------------------------------------------


def test_layers_of_windows_have_tables_of_their_own(bench_of, run_all):
    config = CONFIGS["gemma 3"]
    bench = bench_of(random_model(config), config)
    check_alike(bench, run_all, (2, 3), groups=group_layers(config.kv_layers))


def test_requests_with_sinks_and_a_window(bench, run_all):
    sizes = {"max_model_len": 256, "num_blocks": 128, "sink_windows": SinkWindowRules()}
    expected, _ = run_all(bench.engine(kernels="native", **sizes), sink_requests())
    engine = bench.engine(kernels="native", tp=2, **sizes)
    answers, _ = run_all(engine, sink_requests())
    check_followers(engine)
    assert answers == expected
