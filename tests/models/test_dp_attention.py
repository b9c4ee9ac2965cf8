"""Engines whose ranks are processes with requests of their own: tiny models of latent attention."""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import replace

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, EngineError
from octavo.core.request import Request
from octavo.kernels.cpu import library
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs
from octavo.sim.agenda import Agenda
from octavo.sim.replica import Replica, ReplicaSpec

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone"),
]
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90)), list(range(20, 80))]
SETTINGS = {"threads": 2, "max_model_len": 128, "kernels": "native"}
TWO_RANKS = {"tensor_parallel_size": 2, "enable_dp_attention": True, **SETTINGS}


def answers(llm: LLM, n: int = 1) -> list[tuple[list[int], float]]:
    params = SamplingParams(n=n, max_tokens=12, temperature=0.8, seed=4, logprobs=1)
    params = params.with_changes(ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [(one.token_ids, one.cumulative_logprob) for o in outputs for one in o.outputs]


def engine_of(llm: LLM):
    return llm._text_engine.engine


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_answers_are_those_of_one_rank_with_twice_the_blocks(tiny_hf, name):
    path = str(tiny_hf(name))
    with LLM(path, **SETTINGS) as llm:
        expected = answers(llm, n=2)
    for more in ({}, {"enable_expert_parallel": True}):
        with LLM(path, num_blocks=40, **TWO_RANKS, **more) as llm:
            assert answers(llm, n=2) == expected
            assert llm.engine_info()["kv_blocks"] == 80
            assert llm.engine_info()["enable_dp_attention"] is True
            assert engine_of(llm).scheduler.block_manager.num_blocks == 80
            assert engine_of(llm).num_invariant_violations == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek-v2-groups-yarn", "deepseek-v3-halves"])
@pytest.mark.parametrize("size", [2, 3])
def test_further_families(tiny_hf, name, size):
    path = str(tiny_hf(name))
    settings = {**TWO_RANKS, "tensor_parallel_size": size, "threads": size}
    with LLM(path, **SETTINGS) as llm:
        expected = answers(llm, n=3)
    with LLM(path, **settings) as llm:
        assert answers(llm, n=3) == expected


def test_a_draft_model_has_kv_of_the_requests_of_all_ranks(tiny_hf):
    path = str(tiny_hf("deepseek-v2"))
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": path}
    with LLM(path, **SETTINGS) as llm:
        expected = answers(llm)
    with LLM(path, num_blocks=24, speculative_config=config, **TWO_RANKS) as llm:
        drafted = answers(llm)
        assert engine_of(llm).stats().num_drafts > 0
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in expected]


class Unheard:
    """A ``ReplicaListener`` for whom only steps count."""

    def received(self, request, token_ids, now) -> None: ...
    def ended(self, request, now) -> None: ...
    def refused(self, request, error) -> None:
        raise error


def shape_of(step) -> list[tuple[str, int, int, int]]:
    return [(i.request.request_id, i.start, i.num_tokens, i.request.pool) for i in step.batch.items]


def test_a_live_engine_takes_the_steps_of_a_simulated_one(tiny_hf):
    """Prompts in chunks, prefixes that are found, samples, and pools that overflow."""

    def requests() -> list[Request]:
        rng = random.Random(3)
        found: list[Request] = []
        for i in range(30):
            prompt = [*range(20, 20 + rng.choice([0, 32])), *(rng.randrange(9, 90) for _ in "abc")]
            params = SamplingParams(max_tokens=1 + 2 * i, ignore_eos=True)
            found.append(Request(f"{i}", prompt, params, 0.0, seed=i))
            if i % 7 == 3:
                found.append(Request(f"{i}b", prompt, params, 0.0, fork_of=found[-1]))
        return found

    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_blocks": 8}
    loaded = load_engine(EngineArgs(str(tiny_hf("deepseek-v2")), **sizes, **TWO_RANKS))
    engine, live = loaded.text_engine.engine, []
    engine.scheduler.lookahead.max_multi_steps = 1  # else the clock says how many
    config = replace(loaded.config, scheduler=replace(loaded.config.scheduler, max_multi_steps=1))
    try:
        for request in requests():
            engine.add(request)
        while (step := engine.step()) is not None:
            live.append(shape_of(step))
        assert engine.stats().num_preemptions > 0
        assert engine.stats().prefix_tokens_hit > 0
    finally:
        engine.close()
    agenda, simulated = Agenda(), []
    replica = Replica(
        *("one", ReplicaSpec(config, lambda batch: 0.01), agenda, Unheard()),
        watch=lambda times: simulated.append(shape_of(times.step)),
    )
    for request in requests():
        replica.add(request)
    replica.begin()
    agenda.run(replica.begin)
    assert live == simulated
    assert {pool for step in live for *_, pool in step} == {0, 1}


def test_the_end_of_a_rank_is_the_end_of_the_engine(tiny_hf):
    with LLM(str(tiny_hf("deepseek-v2")), **TWO_RANKS) as llm:
        answers(llm)
        (follower,) = llm._loaded.ranks._followers.pids
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(EngineError):
            answers(llm)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("llama", {}, "KV heads of this model are shared out to ranks anyway"),
        ("deepseek-v2", {"kernels": "reference"}, "native CPU kernels"),
        ("deepseek-v2", {"tensor_parallel_size": 1}, "tensor_parallel_size, which is 1"),
        ("deepseek-v2", {"pipeline_parallel_size": 2}, "not with pipeline_parallel_size=2"),
        ("deepseek-v2", {"swap_space": 1}, "leave out swap_space, kv_offload"),
        ("deepseek-v2", {"kv_offload": "kv:1GiB"}, "leave out swap_space, kv_offload"),
        ("deepseek-v2", {"spec_method": "early_exit"}, "another method of speculation"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    tiny_hf, name, more, said, monkeypatch
):
    monkeypatch.setattr("octavo.serving.rank_group.Followers", None)
    with pytest.raises(ConfigError, match=f"enable_dp_attention: .*{said}"):
        LLM(str(tiny_hf(name)), **{**TWO_RANKS, **more})
