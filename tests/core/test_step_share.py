from __future__ import annotations

import pytest

from octavo.core.step_share import MIN_PROMPT_TOKENS, PipelineShare, WholeShare

DEPTH = 4


def counts(step):
    return {item.request.request_id: item.num_tokens for item in step.batch.items}


def decoding_requests(make_request, count, max_tokens=6):
    return [make_request(f"r{i}", [i + 1], max_tokens=max_tokens) for i in range(count)]


def pipeline(make_engine, **config):
    tokens = config.setdefault("max_num_batched_tokens", 2048)
    return make_engine(
        depth=DEPTH, feeds=lambda request: False, share=PipelineShare(DEPTH, tokens), **config
    )


def test_requests_that_start_together_are_spread_over_the_steps(make_engine, make_request):
    engine = pipeline(make_engine, max_num_seqs=8)
    for request in decoding_requests(make_request, 8):
        engine.add(request)
    sizes = []
    while (step := engine.step()) is not None:
        sizes.append(step.batch.num_seqs)
    assert sizes[0] == 8  # their prompts
    assert sizes[1:] == [2] * (5 * DEPTH)  # of five tokens each


def test_without_a_share_they_stay_together(make_engine, make_request):
    engine = make_engine(depth=DEPTH, feeds=lambda request: False, max_num_seqs=8)
    for request in decoding_requests(make_request, 8):
        engine.add(request)
    sizes = []
    while (step := engine.step()) is not None:
        sizes.append(step.batch.num_seqs)
    assert sizes == [8] * 6


@pytest.mark.parametrize(("num_seqs", "each"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_step_takes_a_part_rounded_up(make_request, num_seqs, each):
    running = decoding_requests(make_request, num_seqs)
    share = PipelineShare(DEPTH, 2048)
    assert share.decoding(running, running) == running[:each]
    assert WholeShare().decoding(running, running) is running


def test_those_in_flight_count(make_request):
    running = decoding_requests(make_request, 8)
    for request in running[:6]:
        request.num_tokens_in_flight = 1
    assert len(PipelineShare(DEPTH, 2048).decoding(running[6:], running)) == 2


def test_prompts_under_way_do_not(make_request):
    prompts = [make_request(f"p{i}", [1] * 50) for i in range(20)]
    running = decoding_requests(make_request, 4)
    assert len(PipelineShare(DEPTH, 2048).decoding(running, [*prompts, *running])) == 1


def test_prompt_tokens():
    share = PipelineShare(DEPTH, 2048)
    assert share.prompt_tokens([8000]) == 2000
    assert share.prompt_tokens([4001, 3999, 2]) == 2001
    assert share.prompt_tokens([]) == share.prompt_tokens([900]) == MIN_PROMPT_TOKENS
    assert WholeShare().prompt_tokens([8000]) == float("inf")


def test_no_more_of_the_queue_is_read_than_matters():
    read = []

    def due():
        for index in range(1000):
            read.append(index)
            yield 1000

    assert PipelineShare(DEPTH, 2048).prompt_tokens(due()) >= 2048
    assert len(read) == 9


def test_chunks_of_a_prompt_follow_each_other_through_the_stages(make_engine, make_request):
    engine = pipeline(make_engine, num_blocks=2000, max_model_len=4000)
    engine.add(make_request("a", list(range(1, 3001)), max_tokens=2))
    while engine.begin_step():
        pass
    found = []
    while (step := engine.step()) is not None:
        found.append(counts(step)["a"])
    assert found == [750, 563, 422, 317, 256, 256, 256, 180, 1]


def test_a_prompt_that_may_not_be_cut_is_not(make_engine, make_request):
    engine = pipeline(
        make_engine,
        num_blocks=2000,
        max_model_len=2000,
        enable_chunked_prefill=False,
    )
    engine.add(make_request("a", list(range(1, 1501)), max_tokens=1))
    assert counts(engine.step()) == {"a": 1500}
