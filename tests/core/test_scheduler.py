from __future__ import annotations

import pytest
from hash_model import expected_tokens

from octavo.base.errors import ConfigError, InvalidRequestError, PromptTooLongError, QueueFullError
from octavo.core.admission import StaticAdmission
from octavo.core.request import FinishReason, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import SchedulerConfig


def scheduled(step) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in step.batch.items]


def test_prefill_and_decode_share_one_budget(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("a", [1, 2, 3]))
    assert scheduled(engine.step()) == [("a", 0, 3)]
    engine.add(make_request("b", list(range(20))))
    assert scheduled(engine.step()) == [("a", 3, 1), ("b", 0, 7)]
    assert scheduled(engine.step()) == [("a", 4, 1), ("b", 7, 7)]
    assert scheduled(engine.step()) == [("a", 5, 1), ("b", 14, 6)]


def test_a_decode_never_waits_behind_a_prompt(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=4)
    engine.add(make_request("short", [1], max_tokens=8))
    engine.step()
    engine.add(make_request("long", list(range(30))))
    engine.step()
    engine.scheduler.running.reverse()  # whatever the order of admission was
    assert scheduled(engine.step()) == [("short", 2, 1), ("long", 3, 3)]


def test_without_chunking_a_prompt_waits_for_a_step_it_fits(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
    engine.add(make_request("a", [1] * 10))
    engine.add(make_request("b", [2] * 10))
    assert scheduled(engine.step()) == [("a", 0, 10)]
    assert scheduled(engine.step()) == [("a", 10, 1), ("b", 0, 10)]


def test_seats_bound_the_running_requests(make_engine, make_request, run):
    engine = make_engine(max_num_seqs=2)
    for index in range(5):
        engine.add(make_request(str(index), [index + 1]))
    step = engine.step()
    assert step.stats.num_running == 2 and step.stats.num_waiting == 3
    assert [request.request_id for request in run(engine)] == list("01234")


def test_a_cached_prefix_is_not_computed_again(make_engine, make_request, run):
    engine = make_engine(block_size=4)
    engine.add(make_request("a", list(range(10))))
    run(engine)
    engine.add(make_request("b", [*range(10), 77]))
    step = engine.step()
    assert scheduled(step) == [("b", 8, 3)]
    assert step.batch.items[0].request.stats.num_cached_tokens == 8
    assert step.stats.prefix_tokens_hit == 8 and step.stats.prefix_tokens_queried == 21


def test_the_last_token_is_always_computed(make_engine, make_request, run):
    engine = make_engine(block_size=4)
    engine.add(make_request("a", list(range(8))))
    run(engine)
    engine.add(make_request("b", list(range(8))))
    assert scheduled(engine.step()) == [("b", 4, 4)]


def test_prompt_logprobs_compute_the_whole_prompt(make_engine, make_request, run):
    engine = make_engine(block_size=4)
    engine.add(make_request("a", list(range(10))))
    run(engine)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    engine.add(make_request("b", list(range(10)), params=params))
    assert scheduled(engine.step()) == [("b", 0, 10)]


def test_samples_of_a_prompt_fork_from_the_first(make_engine, make_request, run):
    engine = make_engine(num_blocks=32, block_size=4, prefix_caching=False)
    leader = make_request("a#0", list(range(10)))
    forks = [make_request(f"a#{i}", list(range(10)), fork_of=leader) for i in (1, 2)]
    for request in (leader, *forks):
        engine.add(request)
    assert scheduled(engine.step()) == [("a#0", 0, 10)]
    step = engine.step()
    assert scheduled(step) == [("a#0", 10, 1), ("a#1", 9, 1), ("a#2", 9, 1)]
    assert len(step.batch.block_copies) == 2
    assert step.stats.num_used_blocks == 5  # two shared by all, and a tail each
    answer = expected_tokens(range(10), 4, 97)
    assert all(request.output_token_ids == answer for request in run(engine))


def test_forks_of_an_aborted_request_compute_for_themselves(make_engine, make_request, run):
    engine = make_engine(max_num_batched_tokens=4, prefix_caching=False)
    leader = make_request("a", list(range(10)))
    fork = make_request("b", list(range(10)), fork_of=leader)
    engine.add(leader)
    engine.add(fork)
    engine.step()
    engine.abort("a")
    assert run(engine) == [fork]
    assert fork.output_token_ids == expected_tokens(range(10), 4, 97)


def test_the_cheapest_request_behind_is_preempted(make_engine, make_request, run):
    engine = make_engine(num_blocks=9, block_size=2, prefix_caching=False)
    first = make_request("first", [1] * 4, max_tokens=10)
    dear = make_request("dear", [2] * 4, max_tokens=10)
    cheap = make_request("cheap", [3] * 2, max_tokens=10)
    for request in (first, dear, cheap):
        engine.add(request)
        engine.step()
    preempted = []
    while engine.has_unfinished_requests and not preempted:
        preempted += engine.step().batch.preempted_ids
    assert preempted == ["cheap"]
    run(engine)
    assert cheap.num_preemptions and not first.num_preemptions
    for request in (first, dear, cheap):
        answer = expected_tokens(request.prompt_token_ids, 10, 97)
        assert request.output_token_ids == answer


def test_every_preemption_is_paid_for_with_a_token(make_engine, make_request):
    engine = make_engine(num_blocks=12, block_size=2, max_num_batched_tokens=6)
    requests = [make_request(str(i), [i] * 5, max_tokens=15) for i in range(6)]
    for request in requests:
        engine.add(request)
    at_last_preemption = dict.fromkeys(requests, 0)
    num_preemptions = 0
    while engine.has_unfinished_requests:
        step = engine.step()
        for request in requests:
            if request.request_id in step.batch.preempted_ids:
                assert request.num_output_tokens > at_last_preemption[request]
                at_last_preemption[request] = request.num_output_tokens
                num_preemptions += 1
    assert num_preemptions > 0


def test_priorities_come_first_and_age(make_engine, make_request, run):
    engine = make_engine(max_num_seqs=1, ageing_steps=8)
    engine.add(make_request("running", [1], max_tokens=30))
    engine.step()
    engine.add(make_request("low", [2], priority=2))
    engine.add(make_request("high", [3], priority=-1))
    for _ in range(17):
        engine.step()
    engine.add(make_request("late", [4], priority=0))  # 17 steps are worth two levels of 8
    assert [request.request_id for request in run(engine)] == ["running", "high", "low", "late"]


def test_a_flood_of_urgent_requests_starves_nobody(make_engine, make_request):
    engine = make_engine(max_num_seqs=2, ageing_steps=4)
    patient = make_request("patient", [1, 2], priority=5)
    engine.add(patient)
    for index in range(200):
        if not patient.is_finished:
            engine.add(make_request(f"urgent{index}", [3], priority=-5, max_tokens=2))
            engine.step()
    assert patient.is_finished


@pytest.mark.parametrize("priority", [6, 2**31, 10**30])
def test_no_priority_is_so_high_that_it_starves_others_for_long(
    make_engine, make_request, priority
):
    """However far apart two priorities are, the later one overtakes for a bounded time only."""
    engine = make_engine(max_num_seqs=1, ageing_steps=4, max_priority=5)
    patient = make_request("patient", [1, 2], priority=priority, max_tokens=2)
    engine.add(patient)
    for index in range(2 * 5 * 4 + 4):
        if not patient.is_finished:
            urgent = make_request(f"urgent{index}", [3], priority=-priority, max_tokens=1)
            engine.add(urgent)
            engine.step()
    assert patient.num_output_tokens > 0


def test_static_batches_do_not_mix(make_engine, make_request, run):
    engine = make_engine(admission=StaticAdmission(), max_num_seqs=2)
    for index, length in enumerate([2, 6, 3]):
        engine.add(make_request(str(index), [index + 1], max_tokens=length))
    batches = []
    while engine.has_unfinished_requests:
        batches.append({entry[0] for entry in scheduled(engine.step())})
    assert batches == [{"0", "1"}] * 2 + [{"1"}] * 4 + [{"2"}] * 3


@pytest.mark.parametrize("static", [False, True])
def test_stop_tokens_and_lengths(make_engine, make_request, run, static):
    answer = expected_tokens([5, 6], 6, 97)
    engine = make_engine(admission=StaticAdmission() if static else None)
    cases = {
        "eos": (SamplingParams(max_tokens=6), (answer[2],), 3, FinishReason.STOP, None),
        "ignored": (SamplingParams(max_tokens=6, ignore_eos=True), (answer[2],), 6, "length", None),
        "stop id": (
            SamplingParams(max_tokens=6, stop_token_ids=[answer[1]]),
            (),
            2,
            FinishReason.STOP,
            answer[1],
        ),
        "min": (SamplingParams(max_tokens=6, min_tokens=5), (answer[2],), 6, "length", None),
    }
    for name, (params, eos, *_) in cases.items():
        engine.add(make_request(name, [5, 6], params=params, eos_token_ids=eos))
    for request in run(engine):
        _, _, length, reason, stop_reason = cases[request.request_id]
        assert request.output_token_ids == answer[:length]
        assert request.finish_reason is FinishReason(reason)
        assert request.stop_reason == stop_reason


def test_without_max_tokens_the_context_is_the_end(make_engine, make_request, run):
    engine = make_engine(max_model_len=20)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    engine.add(make_request("a", [1, 2], params=params))
    (request,) = run(engine)
    assert request.num_output_tokens == 18 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "words"),
    [
        ([], 4, InvalidRequestError, "empty"),
        ([1] * 64, 1, PromptTooLongError, "64 tokens and the context holds 64"),
        ([1] * 30, 40, PromptTooLongError, "lower max_tokens to 34"),
        ([1] * 45, 4, PromptTooLongError, "KV pool"),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(
    make_engine, make_request, prompt, max_tokens, error, words
):
    engine = make_engine(num_blocks=32 if max_tokens != 4 else 11, block_size=4)
    with pytest.raises(error, match=words):
        engine.add(make_request("a", prompt, max_tokens=max_tokens))
    assert not engine.has_unfinished_requests and engine.step() is None


def test_a_request_that_fills_the_pool_exactly_is_served(make_engine, make_request, run):
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add(make_request("a", [1] * 10, max_tokens=7))
    assert run(engine)[0].num_output_tokens == 7
    with pytest.raises(PromptTooLongError):
        engine.add(make_request("b", [1] * 10, max_tokens=8))


def test_the_queue_is_bounded_in_requests_and_tokens(make_engine, make_request):
    engine = make_engine(max_queued_requests=2, max_queued_tokens=20)
    engine.add(make_request("a", [1] * 4))  # with its answer, 8 tokens
    with pytest.raises(QueueFullError, match="8 tokens"):
        engine.add(make_request("b", [1] * 4, max_tokens=9))
    engine.add(make_request("c", [1] * 4))
    with pytest.raises(QueueFullError, match="2 requests"):
        engine.add(make_request("d", [1]))
    engine.step()
    engine.add(make_request("d", [1]))


def test_ids_in_use_are_refused_and_free_again_afterwards(make_engine, make_request, run):
    engine = make_engine()
    engine.add(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(make_request("a", [2]))
    run(engine)
    engine.add(make_request("a", [3]))
    assert run(engine)[0].output_token_ids == expected_tokens([3], 4, 97)


def test_abort_in_every_state(make_engine, make_request, run):
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=2)
    waiting, running = make_request("w", [1] * 6), make_request("r", [2] * 6)
    engine.add(running)
    engine.add(waiting)
    engine.step()
    assert (running.status, waiting.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    for request_id in ("w", "r", "w", "r", "unknown"):
        engine.abort(request_id)
    assert not engine.has_unfinished_requests
    assert engine.scheduler.block_manager.num_used_blocks == 0
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT


def test_abort_in_flight_frees_its_blocks_at_the_end_of_the_step(make_engine, make_request):
    engine = make_engine()
    request = make_request("a", [1, 2, 3])
    engine.add(request)
    assert engine.begin_step()
    engine.abort("a")
    assert request.is_finished and engine.scheduler.block_manager.num_used_blocks == 1
    step = engine.finish_step()
    assert step.updates == [] and step.stats.num_used_blocks == 0
    assert request.output_token_ids == []


def test_a_config_that_cannot_work_says_why():
    with pytest.raises(ConfigError, match="chunked"):
        SchedulerConfig(max_num_batched_tokens=8, max_model_len=16, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SchedulerConfig(max_num_seqs=0)
