"""Engines whose ranks add up their results, on the GPU's path with plain ops: nearly the answers of
one rank, and with canonical sums to the bit."""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path

import numpy as np
import pytest
from faults import FaultyScheduler, every
from fused_models import CONFIGS, random_model
from hash_model import FunctionProposer
from hypothesis import given, settings
from hypothesis import strategies as st
from native_requests import short_requests
from paging_variants import VARIANTS as PAGING
from paging_variants import make_requests

from octavo.base.errors import PeerEndedError
from octavo.core.batch import Draft
from octavo.kernels.cpu import library
from octavo.kernels.cpu.group import ShmGroup
from octavo.kernels.cuda.device_group import Alone
from octavo.runtime import cuda_backend
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_ranks import LOGITS_WORDS, STEP_WORDS, CudaFollower
from octavo.runtime.rank import Rank
from octavo.runtime.step_words import COPY, BadMessage
from octavo.runtime.streams import HostStream
from octavo.serving.follower import follower_of

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

VARIANTS = {
    "two ranks": {"tp": 2},
    "four ranks": {"tp": 4},
    "int8 KV": {"tp": 2, "kv_cache_dtype": "int8"},
    **{
        name: {"tp": 2, **PAGING[name]}
        for name in ("budget 7", "tiny pool", "tiny pool, host cache", "three slots")
    },
}
FUSED = {"kernels": "fused", "batch_invariant": True}


@pytest.fixture(scope="module")
def alone(bench, run_all):
    """The answers of one rank when every request runs by itself, by the type of its KV."""

    def answers(kind):
        engine = bench.engine(**FUSED, prefix_caching=False, kv_cache_dtype=kind)
        return run_all(engine, make_requests(bench.config.vocab_size), together=False)[0]

    return {kind: answers(kind) for kind in ("auto", "int8")}


@pytest.fixture
def graphs(monkeypatch):
    """Steps are captured, as on a GPU; a graph is the same work, done again."""
    monkeypatch.setattr(HostStream, "captures", True)


@pytest.mark.parametrize("name", VARIANTS)
def test_canonical_answers_are_those_of_one_rank(bench, run_all, alone, name):
    settings = VARIANTS[name]
    engine = bench.engine(**FUSED, **settings)
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert engine.executor.depth == 2
    assert answers == alone[settings.get("kv_cache_dtype", "auto")]
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


def test_all_ranks_replay_the_same_graphs(bench, run_all, alone, graphs):
    engine = bench.engine(**FUSED, tp=2)
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert engine.executor.forward.graphs.bytes_by_shape
    assert answers == alone["auto"]


def test_preemptions_change_nothing(bench, run_all, alone):
    engine = bench.engine(**FUSED, tp=2)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert answers == alone["auto"]


def test_drafts_change_nothing(bench, run_all):
    """Right ones before a wrong one; those of drawn tokens are weighed by logits of all ranks."""
    requests = short_requests(bench.config.vocab_size, max_tokens=20)
    expected, _ = run_all(bench.engine(**FUSED), requests)
    whole = [[*request.prompt_token_ids, *expected[request.request_id][0]] for request in requests]

    def propose(prompt: list[int], length: int) -> Draft | None:
        known = next(tokens for tokens in whole if tokens[: len(prompt)] == list(prompt))
        right = tuple(known[length : length + 3])
        if len(right) < 3:
            return None
        return Draft.chain((*right, (right[0] + 1) % bench.config.vocab_size))

    engine = bench.engine(**FUSED, tp=2, proposer=FunctionProposer(propose, 3))
    answers, steps = run_all(engine, short_requests(bench.config.vocab_size, max_tokens=20))
    assert engine.executor.failures_of_followers == []
    assert answers == expected
    assert any(item.draft is not None for step in steps for item in step.batch.items)


def test_a_model_that_ends_early_does_so_in_all_ranks(bench, run_all):
    def logits_of(engine):
        early = engine.executor.forward.exit_after(1)
        engine.executor.runner.forward = early
        return run_all(engine, short_requests(bench.config.vocab_size))[0]

    engine = bench.engine(**FUSED, tp=2)
    assert logits_of(engine) == logits_of(bench.engine(**FUSED))
    assert engine.executor.failures_of_followers == []


@pytest.mark.parametrize("name", CONFIGS)
def test_families(bench_of, run_all, name):
    bench = bench_of(random_model(CONFIGS[name]), CONFIGS[name])
    options = {**FUSED, "max_model_len": 64}
    expected, _ = run_all(bench.engine(**options), short_requests(bench.config.vocab_size))
    engine = bench.engine(**options, tp=2)
    answers, _ = run_all(engine, short_requests(bench.config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert answers == expected


def test_a_step_that_rank_0_cannot_launch_ends_the_group(bench, run_all, monkeypatch):
    """The others wait in the middle of it."""
    engine = bench.engine(**FUSED, tp=2)
    engine.add(short_requests(bench.config.vocab_size)[0])
    monkeypatch.setattr(engine.executor.forward, "_compute", lambda views: 1 / 0)
    with pytest.raises(PeerEndedError, match="could not launch"):
        while engine.step() is not None:
            pass


# -- messages -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(bench) -> list[np.ndarray]:
    """All messages of an engine to its follower: prompts, decoding, copies and logits."""
    engine = bench.engine(**FUSED, tp=2, num_blocks=30, block_size=4, num_places=60)
    messages: list[np.ndarray] = []
    group = engine.executor.spec.group
    send = group.send

    def kept(words: array[int]) -> None:
        messages.append(np.array(words, np.int32))
        send(words)

    group.send = kept
    for request in make_requests(bench.config.vocab_size):
        engine.add(request)
    while engine.step() is not None:
        pass
    return messages


def test_a_decoding_step_takes_forty_bytes_a_request(sent):
    decodes = [each for each in sent if each[0] == STEP_WORDS and each[2] == each[3] == 4]
    assert decodes
    assert min(each.nbytes for each in decodes) <= 40 * 4 + 200


class NoOthers(Alone):
    """A rank whose others say nothing."""

    rank, size = 1, 2

    def gather(self, x, out):
        return False


@pytest.fixture(scope="module")
def follower(bench) -> CudaFollower:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend, "open_group", lambda spec: NoOthers())
        home = ShmGroup.create(2)
        group = ShmGroup.attach(os.dup(home.fd), 1, 2)
        spec = RankSpec(Path("."), kernels="fused", batch_invariant=True, block_size=4, group=group)
        rank = Rank.of_model(spec, bench.model, bench.config)
    rank.start(RankLimits(30, 16, 128, 2048, num_host_blocks=60))
    return follower_of(rank.forward)


def test_a_follower_does_what_it_is_told(sent, follower):
    assert {int(each[0]) for each in sent} >= {STEP_WORDS, LOGITS_WORDS, COPY}
    for message in sent:
        follower.obey(message)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_follower_believes_nothing(sent, follower, data):
    """It does what a message says, or says what is wrong with it."""
    message = data.draw(st.sampled_from(sent)).copy()
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, min(len(message) - 1, 60)))
        message[place] = data.draw(
            st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 300))
        )
    if data.draw(st.booleans()):
        message = message[: data.draw(st.integers(0, len(message)))]
    with contextlib.suppress(BadMessage):
        follower.obey(message)
