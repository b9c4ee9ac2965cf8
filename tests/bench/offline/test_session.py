"""An engine timed from outside: what is counted, not how fast it is."""

from __future__ import annotations

import pytest

from octavo.base.errors import PromptTooLongError
from octavo.bench.offline.session import OfflineSession, RunTiming, StepTiming
from octavo.core.stats import RequestStats
from octavo.settings.engine import EngineArgs
from octavo.workload.requests import WorkloadRequest


@pytest.fixture(scope="module")
def session(tiny_model):
    args = EngineArgs(
        model=str(tiny_model),
        kernels="reference",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_queued_requests=2,
        threads=1,
    )
    with OfflineSession(args) as session:
        yield session


def request(index: int, length: int, output_len: int | None = 4) -> WorkloadRequest:
    ids = tuple((index * 31 + i * 7) % 250 for i in range(length))
    return WorkloadRequest(str(index), prompt_token_ids=ids, output_len=output_len)


def test_every_token_of_every_request_is_there(session):
    timing = session.run([request(1, 20), request(2, 50, output_len=6)])
    assert [stats.num_prompt_tokens for stats in timing.requests] == [20, 50]
    assert [len(ids) for ids in timing.output_token_ids] == [4, 6]
    assert timing.num_prompt_tokens == 70 and timing.num_output_tokens == 10
    assert timing.elapsed_s >= sum(step.wall_s for step in timing.steps) > 0


def test_steps_account_for_all_that_was_computed(session):
    timing = session.run([request(3, 20), request(4, 50, output_len=6)])
    chunks = [chunk for step in timing.steps for chunk in step.chunks]
    # The last token of an answer is never put in; nothing was cached.
    assert sum(chunk.num_tokens for chunk in chunks) == 70 + (4 - 1) + (6 - 1)
    assert sum(chunk.samples for chunk in chunks) == 10
    for step in timing.steps:
        assert step.num_seqs == len(step.chunks) and step.num_tokens <= 32
        assert step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks)
        assert step.is_pure_decode == all(chunk.num_tokens == 1 for chunk in step.chunks)
        assert 0 < step.kernel_s < step.wall_s
        assert 0 <= step.kv_utilisation <= 1
    assert timing.steps[0].kv_utilisation > 0


def test_a_prompt_in_pieces_samples_with_its_last_one(session):
    timing = session.run([request(5, 70, output_len=2)])
    (first, second, third, decode) = timing.steps
    assert [step.chunks[0][:2] for step in timing.steps] == [(0, 32), (32, 32), (64, 6), (70, 1)]
    assert [step.chunks[0].samples for step in timing.steps] == [False, False, True, True]
    assert first.num_multi_steps == second.num_multi_steps == 0 and third.num_multi_steps == 1
    assert decode.is_pure_decode and not third.is_pure_decode


def test_more_requests_than_the_queue_holds(session):
    timing = session.run([request(index, 5) for index in range(20, 31)])
    assert len(timing.requests) == 11 and timing.num_output_tokens == 44


def test_prefixes_are_shared_within_a_salt_alone(session):
    def cached(salt: str) -> int:
        timing = session.run([request(40, 64)], cache_salt=salt)
        return timing.requests[0].num_cached_tokens

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_observers_see_every_batch(session):
    seen = []
    timing = session.run([request(50, 40)], seen.append)
    assert [batch.num_tokens for batch in seen] == [step.num_tokens for step in timing.steps]


def test_text_and_conversations_are_tokenized_as_the_model_wants(session):
    text = WorkloadRequest("a", prompt="hi", output_len=1)
    talk = WorkloadRequest("b", messages=({"role": "user", "content": "hi"},), output_len=1)
    assert bytes(session.token_ids(text)[-2:]) != b"" and len(session.token_ids(text)) >= 2
    assert len(session.token_ids(talk)) > len(session.token_ids(text))
    assert session.run([text, talk]).num_output_tokens == 2


def test_a_request_without_a_length_ends_where_the_model_ends_it(session):
    (ids,) = session.run([request(60, 8, output_len=None)]).output_token_ids
    limit = session.info["max_model_len"]
    assert 1 <= len(ids) <= limit - 8
    assert len(ids) == limit - 8 or ids[-1] == 256


def test_one_that_cannot_be_served_takes_the_others_with_it_and_no_more(session):
    with pytest.raises(PromptTooLongError):
        session.run([request(70, 8), request(71, 300)])
    assert session.run([request(72, 8)]).num_output_tokens == 4


def test_the_engine_is_described(session, tiny_model):
    info = session.info
    assert info["model"] == str(tiny_model) and info["kernels"] == "reference"
    assert info["max_num_seqs"] == 4 and info["max_num_batched_tokens"] == 32
    assert info["prefix_caching"] is True and info["kv_dtype"] == "float32"
    assert session.vocab_size == 260


def test_overhead_is_per_token_of_a_request():
    step = StepTiming(1, 1, True, num_multi_steps=4, wall_s=10e-3, kernel_s=6e-3)
    assert step.overhead_s == pytest.approx(1e-3)
    nothing = StepTiming(1, 8, False, num_multi_steps=0, wall_s=10e-3, kernel_s=6e-3)
    assert nothing.overhead_s == pytest.approx(4e-3)


def test_totals_are_sums():
    stats = [RequestStats(0.0, 10, 3, num_preemptions=1), RequestStats(0.0, 5, 2)]
    timing = RunTiming(1.0, stats, [[1, 2, 3], [4, 5]])
    assert (timing.num_prompt_tokens, timing.num_output_tokens) == (15, 5)
    assert timing.num_preemptions == 1
