from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.offline.prefix import (
    PrefixPlan,
    PrefixResult,
    PrefixSample,
    TimedAnswer,
    measure_prefix,
)
from octavo.bench.offline.session import OfflineSession
from octavo.measure.statistics import MedianRange
from octavo.settings.engine import EngineArgs


def answer(ttft, cached=0, tokens=(1, 2), e2e=None):
    return TimedAnswer(ttft, e2e or ttft + 0.1, 100, cached, tokens)


def test_figures_by_hand():
    plan = PrefixPlan(questions=3, repeat=2)
    result = PrefixResult(
        plan,
        [
            PrefixSample(
                [answer(0.8), answer(0.1, 80), answer(0.3, 80)],
                [answer(0.8), answer(0.9), answer(1.0)],
            ),
            PrefixSample(
                [answer(0.9), answer(0.1, 80), answer(0.1, 80)],
                [answer(0.8), answer(0.8), answer(0.8)],
            ),
        ],
    )
    assert result.cold_ttft == MedianRange(pytest.approx(0.85), 0.8, 0.9)
    assert result.warm_ttft == MedianRange(pytest.approx(0.15), 0.1, pytest.approx(0.2))
    assert result.no_cache_ttft.max == 0.9
    assert result.speedup.min == pytest.approx(4) and result.speedup.max == pytest.approx(9)
    assert result.total_speedup.min == pytest.approx(2.7 / 1.4)  # of 2.0 and of 3.0 / 1.5
    assert result.hit_rate == pytest.approx(320 / 600)
    assert result.warm_hit_rate == pytest.approx(0.8)
    document = result.as_json()
    assert document["cold_ttft_ms"]["max"] == 900
    assert document["same_answers"] is True


def test_other_answers_are_noticed():
    sample = PrefixSample([answer(1), answer(1)], [answer(1), answer(1, tokens=(1, 3))])
    assert not PrefixResult(PrefixPlan(), [sample]).same_answers


def test_only_the_first_question_is_cold(tiny_model):
    args = EngineArgs(model=str(tiny_model), device="cpu", kernels="reference")
    plan = PrefixPlan(prefix_len=64, question_len=8, questions=3, output_len=3, repeat=2)
    asked = []
    with (
        OfflineSession(args) as with_cache,
        OfflineSession(
            EngineArgs(
                model=str(tiny_model),
                device="cpu",
                kernels="reference",
                enable_prefix_caching=False,
            )
        ) as without_cache,
    ):
        result = measure_prefix(with_cache, without_cache, plan, lambda: asked.append(1))
    assert len(asked) == 2 * 3
    for sample in result.samples:
        assert [each.num_cached_tokens for each in sample.cached] == [0, 64, 64]
        assert [each.num_cached_tokens for each in sample.uncached] == [0, 0, 0]
        assert {each.num_prompt_tokens for each in sample.cached} == {72}
    assert result.hit_rate == pytest.approx(2 * 64 / (3 * 72))
    assert result.same_answers


def test_a_document_of_ones_own_begins_with_another_mark_each_time():
    document = tuple(range(500, 600))
    plan = PrefixPlan(prefix_len=50, question_len=4, questions=2, repeat=2, document=document)
    first, second = plan.requests(0, 10_000), plan.requests(1, 10_000)
    for requests in (first, second):
        assert all(len(each.prompt_token_ids) == 54 for each in requests)
        assert all(each.prompt_token_ids[1:50] == document[:49] for each in requests)
        assert len({each.prompt_token_ids[0] for each in requests}) == 1
        assert len({each.prompt_token_ids[50:] for each in requests}) == 2
    assert first[0].prompt_token_ids[0] != second[0].prompt_token_ids[0]


def test_wrong_plans():
    with pytest.raises(ConfigError, match="at least two"):
        PrefixPlan(questions=1)
    with pytest.raises(ConfigError, match="has 3 tokens"):
        PrefixPlan(prefix_len=50, document=(1, 2, 3))
