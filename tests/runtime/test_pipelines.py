"""Pipelines, also of tensor-parallel groups, give the answers of one rank, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faults import FaultyScheduler, every
from fused_models import CONFIGS, random_model
from hybrid_models import RECURRENCES, make_hybrid
from native_requests import make_requests, short_requests

from octavo.kernels.cpu import library

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


def deeper(config, num_layers: int):
    """The config of a tiny model with its layers repeated."""
    windows = (config.layer_windows * num_layers)[:num_layers]
    changes = {"num_layers": num_layers, "layer_windows": windows}
    if config.experts is not None:
        layers = (config.experts.layers * num_layers)[:num_layers]
        changes["experts"] = replace(config.experts, layers=layers)
    return replace(config, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_families(bench_of, run_all, name):
    config = deeper(CONFIGS[name], 5)
    bench = bench_of(random_model(config), config)
    check_alike(bench, run_all, [(1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (1, 5)])


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
