from __future__ import annotations

import pytest

from octavo.core.step_share import PipelineShare, WholeShare

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


def test_equal_chunks_of_all_that_is_due(make_request):
    """Sizes of `test_prompt_chunks`, of prompts and of what waits together."""
    share = PipelineShare(DEPTH, 2048)
    running = make_request("a", [1] * 1000)
    assert share.prompt_tokens([running], 2000) == 250
    assert WholeShare().prompt_tokens([running], 2000) == float("inf")


def test_chunks_keep_their_size_until_more_comes():
    share = PipelineShare(DEPTH, 2048)
    assert share.prompt_tokens([], 3000) == 250
    assert [share.prompt_tokens([], due) for due in (2750, 1000, 100)] == [250] * 3
    assert share.prompt_tokens([], 8000) > 250
    assert share.prompt_tokens([], 0) > 250 and share.prompt_tokens([], 3000) == 250


def test_chunks_of_a_prompt_follow_each_other_through_the_stages(make_engine, make_request):
    engine = pipeline(make_engine, num_blocks=2000, max_model_len=4000)
    engine.add(make_request("a", list(range(1, 3001)), max_tokens=2))
    while engine.begin_step():
        pass
    found = []
    while (step := engine.step()) is not None:
        found.append(counts(step)["a"])
    assert found == [250] * 12 + [1]


def test_a_prompt_that_may_not_be_cut_is_not(make_engine, make_request):
    engine = pipeline(
        make_engine,
        num_blocks=2000,
        max_model_len=2000,
        enable_chunked_prefill=False,
    )
    engine.add(make_request("a", list(range(1, 1501)), max_tokens=1))
    assert counts(engine.step()) == {"a": 1500}
