"""Layers with windows answer the same from block tables of their own, and hold fewer blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from faults import FaultyScheduler, every
from hash_model import FunctionProposer
from queued_stream import QueuedStream

from octavo.core.batch import Draft
from octavo.core.kv_tables import most_blocks
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library
from octavo.models.kv_groups import group_layers
from octavo.runtime import cuda_components
from tests.conftest import write_tiny_model

KERNELS = [
    "reference",
    "fused",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    ),
]
WINDOWS = {"all": (20, 20, 20), "some": (20, None, 33)}
VARIANTS = {
    "as it comes": {},
    "blocks of 32": {"block_size": 32},
    "budget 5": {"max_num_batched_tokens": 5},
    "no prefix cache": {"prefix_caching": False, "max_num_batched_tokens": 24},
    "tiny pool": {"max_num_batched_tokens": 24},
    "tiny pool, host cache": {"max_num_batched_tokens": 24, "num_places": 60},
}


@pytest.fixture(scope="module", autouse=True)
def streams():
    """Fused steps run ahead, and are replayed, on a stream that does nothing before it has to."""
    made: list[QueuedStream] = []

    def make() -> QueuedStream:
        made.append(QueuedStream())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_components, "HostStream", make)
        yield made


@pytest.fixture(scope="module", params=WINDOWS)
def bench(request, load_bench, tmp_path_factory):
    """A tiny Llama, some of whose layers see the last positions only."""
    folder = tmp_path_factory.mktemp("windows")
    bench = load_bench(write_tiny_model(folder, num_hidden_layers=3))
    windows = WINDOWS[request.param]
    bench.config = replace(bench.config, layer_windows=windows)
    for layer, window in zip(bench.model.model.layers, windows, strict=True):
        layer.self_attn.window = window
    return bench


def make_requests(vocab_size: int) -> list[Request]:
    """Prompts with shared prefixes and a fork, longer than the windows."""
    rng = random.Random(3)
    shared = [rng.randrange(2, vocab_size) for _ in range(48)]
    requests: list[Request] = []
    for index in range(8):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            max_tokens=rng.randint(8, 40), temperature=0.8 * (index % 2), ignore_eos=True
        )
        prompt = shared[: rng.choice([0, 17, 48])] + own
        requests.append(Request(f"r{index}", prompt, params, 0.0, seed=index))
    leader = requests[-1]
    requests.append(
        Request("fork", leader.prompt_token_ids, leader.params, 0.0, sample_index=1, fork_of=leader)
    )
    return requests


@pytest.fixture(scope="module", params=KERNELS)
def one_table(request, bench, run_all):
    """The kernels, and the answers with one table for all layers, one request after the other."""
    engine = bench.engine(prefix_caching=False, kernels=request.param)
    requests = make_requests(bench.config.vocab_size)
    return request.param, run_all(engine, requests, together=False)[0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(bench, run_all, one_table, streams, name):
    kernels, answers = one_table
    groups = group_layers(bench.config.kv_layers)
    num_blocks = 256
    if name.startswith("tiny pool"):  # that holds the longest request, and hardly more
        num_blocks = most_blocks(groups.windows, 108, 16, 24)
    engine = bench.engine(num_blocks, kernels=kernels, groups=groups, **VARIANTS[name])
    again, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert again == answers
    if name.startswith("tiny pool"):
        assert engine.scheduler.num_preemptions > 0
    if name == "tiny pool, host cache":
        assert engine.stats().kv_blocks_restored > 0
    if name == "as it comes":
        assert engine.scheduler.prefix_tokens_hit > 0
        assert kernels != "fused" or streams[-1].num_replays > 10


def test_neither_preemptions_nor_drafts_change_anything(bench, run_all, one_table):
    kernels, answers = one_table

    said = {
        tuple(request.prompt_token_ids): answers[request.request_id][0]
        for request in make_requests(bench.config.vocab_size)
    }

    def sampled_draft(prompt, position):
        """A tree, where one is known: what is right comes after a sibling that is not, so that its
        KV has to move."""
        next_ones = said[tuple(prompt)][position - len(prompt) :][:2]
        if len(next_ones) < 2:
            return None
        if kernels == "fused":
            return Draft.chain([next_ones[0], next_ones[1] ^ 1])
        return Draft((next_ones[0] ^ 1, *next_ones), (-1, -1, 1))

    engine = bench.engine(
        kernels=kernels,
        groups=group_layers(bench.config.kv_layers),
        proposer=FunctionProposer(sampled_draft),
    )
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(4))
    again, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert again == answers
    assert engine.scheduler.drafts.num_accepted > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_long_answer_holds_no_more_than_its_windows(bench, run_all, kernels):
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    def most_used(groups) -> int:
        engine = bench.engine(kernels=kernels, groups=groups, max_num_batched_tokens=16)
        _, steps = run_all(engine, [Request("long", [*range(2, 22)], params, 0.0)])
        layers = 3 if groups is None else groups.layers_per_block
        return layers * max(step.stats.num_used_blocks for step in steps)

    assert most_used(group_layers(bench.config.kv_layers)) < 0.75 * most_used(None)
