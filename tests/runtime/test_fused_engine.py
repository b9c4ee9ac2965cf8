"""The whole engine on the GPU's path, by plain ops on a stream that does nothing before it has to:
the answers are those of the reference ops, one step after the other."""

from __future__ import annotations

import pytest
from paging_variants import VARIANTS, make_requests
from queued_stream import QueuedStream

from octavo.executor.faulty import FaultyScheduler, every
from octavo.runtime import cuda_backend


@pytest.fixture
def streams(monkeypatch) -> list[QueuedStream]:
    """Those that forwards are made with."""
    made: list[QueuedStream] = []

    def make() -> QueuedStream:
        made.append(QueuedStream())
        return made[-1]

    monkeypatch.setattr(cuda_backend, "HostStream", make)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_the_reference_ops(bench, run_all, reference, streams, name):
    engine = bench.engine(kernels="fused", **VARIANTS[name])
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert_same(answers, reference)
    assert engine.executor.depth == 2 and streams[0].num_replays > 10


def test_preemption_every_third_step_changes_nothing(bench, run_all, reference, streams):
    engine = bench.engine(kernels="fused", block_size=4, num_blocks=256)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert_same(answers, reference)
    assert engine.scheduler.num_preemptions > 5
