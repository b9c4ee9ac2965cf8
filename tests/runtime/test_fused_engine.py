"""The whole engine on the GPU's path, by plain ops on a stream that does nothing before it has to:
the answers are those of the reference ops, one step after the other."""

from __future__ import annotations

import pytest
from faults import FaultyScheduler, every
from paging_variants import VARIANTS, make_requests
from queued_stream import QueuedStream

from octavo import LLM
from octavo.core.host_kv_cache import AlwaysRestore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.offload import restore_rule
from octavo.runtime import cuda_components
from octavo.speculation.ngram import NgramProposer

SOME = (
    *("block size 32", "budget 7", "tiny pool", "tiny pool, no cache", "tiny pool, host cache"),
    *("three slots", "unchunked"),
)

PROMPTS = ["one", "and another one", "abc abc", "x", "the last of them"]


@pytest.fixture
def streams(monkeypatch) -> list[QueuedStream]:
    """Those that forwards are made with."""
    made: list[QueuedStream] = []

    def make() -> QueuedStream:
        made.append(QueuedStream())
        return made[-1]

    monkeypatch.setattr(cuda_components, "HostStream", make)
    return made


@pytest.fixture(scope="module")
def reference(bench, run_all):
    engine = bench.engine(prefix_caching=False)
    return run_all(engine, make_requests(bench.config.vocab_size), together=False)[0]


def assert_same(answers, reference):
    assert {name: tokens for name, (tokens, _) in answers.items()} == {
        name: tokens for name, (tokens, _) in reference.items()
    }
    for name, (_, entries) in answers.items():
        for entry, right in zip(entries, reference[name][1], strict=True):
            assert (entry.token_id, entry.rank) == (right.token_id, right.rank)
            assert entry.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_answers_are_those_of_the_reference_ops(bench, run_all, reference, streams, name):
    engine = bench.engine(kernels="fused", **VARIANTS[name])
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert_same(answers, reference)
    assert engine.executor.depth == 2 and streams[0].num_replays > 10
    assert engine.scheduler.num_preemptions > 0 or "tiny pool" not in name
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


def test_preemption_every_third_step_changes_nothing(bench, run_all, reference, streams):
    engine = bench.engine(kernels="fused", block_size=4, num_blocks=256)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert_same(answers, reference)
    assert engine.scheduler.num_preemptions > 5


def test_what_is_stored_on_a_disk_is_what_was_computed(tiny_model, streams, tmp_path, monkeypatch):
    """Copies to the host are over before anybody writes down what they brought."""
    monkeypatch.setattr(restore_rule, "predicted_rule", lambda *_: AlwaysRestore())
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [prompt * 9 for prompt in PROMPTS]
    settings = {"max_model_len": 192, "num_blocks": 16, "kv_offload": f"{tmp_path / 'kv'}:1MiB"}

    def serve() -> tuple[list[list[int]], int]:
        with LLM(str(tiny_model), kernels="fused", **settings) as llm:
            outputs = llm.generate(prompts, params)
            cached = sum(output.num_cached_tokens for output in outputs)
            return [output.outputs[0].token_ids for output in outputs], cached

    (cold, num_shared), (warm, num_cached) = serve(), serve()
    assert warm == cold and num_cached > num_shared + 100 and len(streams) == 2


def test_stop_strings_end_what_ran_ahead(tiny_model, streams):
    """And what was computed beyond them is nobody's."""

    def answers(kernels: str, **stop) -> list[str]:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, **stop)
        with LLM(str(tiny_model), kernels=kernels, max_model_len=128, max_num_seqs=4) as llm:
            return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]

    whole = answers("reference")
    stop = [text[9:11] for text in whole]
    assert answers("reference", stop=stop) == answers("fused", stop=stop) != whole
    assert streams[0].num_replays > 5


# Of one nothing is drafted, so that it runs ahead.
KINDS = ({}, {"temperature": 0.8}, {"repetition_penalty": 1.2}, {"speculative": {"enabled": False}})


def repetitive_requests() -> list[Request]:
    usual = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    return [
        Request(f"r{i}", [i + 5, 6, 7, 8] * 6, SamplingParams(**(usual | kind)), 0.0, seed=i)
        for i, kind in enumerate(KINDS)
    ]


def test_drafts_change_nothing(bench, run_all, streams):
    plain, _ = run_all(bench.engine(), repetitive_requests(), together=False)
    engine = bench.engine(kernels="fused", proposer=NgramProposer(1, 3))
    answers, _ = run_all(engine, repetitive_requests())
    assert_same(answers, plain)
    assert engine.scheduler.drafts.num_tokens > 10
