from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.offline.ablation import (
    ABLATIONS,
    FIGURES,
    ITL_P99,
    OUTPUT_TPS,
    AblationResult,
    choose_ablations,
)
from octavo.bench.offline.ablation_study import AblationStudy, ablation_settings
from octavo.bench.offline.ablation_workloads import (
    LONE,
    LONG_PROMPT_MEANWHILE,
    SHARED_PREFIX,
    UNEVEN_ANSWERS,
    AblationWork,
    WorkloadScale,
    describe,
    run_engine,
    run_without_kv_cache,
)
from octavo.bench.offline.session import OfflineSession
from octavo.measure.statistics import MedianRange
from octavo.settings.engine import EngineArgs

ROOM = WorkloadScale(vocab_size=256, context=256)
NAMES = [ablation.name for ablation in ABLATIONS]


@pytest.fixture(scope="module")
def settings(tiny_model):
    return ablation_settings(EngineArgs(model=str(tiny_model), device="cpu", kernels="reference"))


@pytest.fixture(scope="module")
def study(settings):
    with OfflineSession(settings) as session:
        yield AblationStudy(session, repeat=2, is_quick=True)


def by_name(name):
    (found,) = choose_ablations([name])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_ablation_is_measured_or_says_why_not(study, settings, name):
    ablation = by_name(name)
    reason = study.why_not(ablation)
    if name in ("native-kernels", "rounds", "kv-int8", "shared-prefix-decode"):
        assert "native" in reason
        return
    if name in ("cuda-graphs", "async-scheduling"):
        assert "CUDA" in reason
        return
    if name == "threads" and settings.threads == 1:
        assert reason == "these settings are without it"
        return
    assert reason is None
    result = study.measure(ablation)
    assert len(result.on) == len(result.off) == 2
    assert result.worth.median > 0
    expected = "not promised" if name in ("kv-bf16", "threads") else "yes"
    assert result.same_answers == expected
    document = result.as_json()
    assert document["worth"]["min"] <= document["worth"]["median"] <= document["worth"]["max"]
    assert set(document["figures"]) <= {figure.name for figure in FIGURES}


@pytest.mark.timing  # several tokens come of one call only where steps are short
def test_with_native_kernels(tiny_model):
    from octavo.kernels.cpu import library

    try:
        library.load()
    except library.Unavailable as unavailable:
        pytest.skip(unavailable.reason)
    args = EngineArgs(model=str(tiny_model), device="cpu", kernels="native", threads=2)
    with OfflineSession(ablation_settings(args)) as session:
        study = AblationStudy(session, repeat=1)
        found = {}
        for name in (
            *("kv-cache", "native-kernels", "rounds", "kv-int8", "threads"),
            "shared-prefix-decode",
        ):
            assert study.why_not(by_name(name)) is None
            found[name] = study.measure(by_name(name))
    assert found["kv-cache"].same_answers == "yes"
    assert found["threads"].same_answers == "yes"
    assert found["shared-prefix-decode"].same_answers == "yes"
    assert found["native-kernels"].same_answers == "not promised"
    # Several tokens of one call come at once: they make fewer gaps than tokens.
    rounds = found["rounds"]
    assert rounds.same_answers == "yes"
    assert len(rounds.on[0].gaps) < len(rounds.off[0].gaps) == rounds.off[0].num_output_tokens - 1


def test_each_ablation_takes_away_what_it_names(study):
    """By the engines' own word, or by what they did."""
    off = {ablation.name: study._off(ablation) for ablation in ABLATIONS}
    assert off["batching"].max_num_seqs == 1
    assert off["continuous-batching"].batching == "static"
    assert off["native-kernels"].kernels == "reference"
    assert off["threads"].threads == 1
    assert not off["prefix-cache"].enable_prefix_caching
    assert not off["shared-prefix-decode"].shared_prefix_decode
    with OfflineSession(off["chunked-prefill"]) as session:
        limits = session.loaded.config.scheduler
        assert not limits.enable_chunked_prefill
        assert limits.max_num_batched_tokens >= limits.max_model_len


def test_prefix_cache_on_hits_and_off_does_not(settings):
    requests = SHARED_PREFIX.create(ROOM, 1)
    cached = {}
    for is_on in (True, False):
        with OfflineSession(replace(settings, enable_prefix_caching=is_on)) as session:
            run = session.run(requests[:1]), session.run(requests[1:2])
            cached[is_on] = run[1].requests[0].num_cached_tokens
    assert cached == {True: 64, False: 0}


def test_without_a_kv_cache_every_token_computes_the_whole_text(settings, monkeypatch):
    requests = LONE.create(ROOM, 5)
    with OfflineSession(settings) as session:
        expected = run_engine(session, LONE, requests)
    with OfflineSession(replace(settings, enable_prefix_caching=False)) as session:
        computed = []
        run = session.run
        monkeypatch.setattr(
            session,
            "run",
            lambda prompts: (computed.append(len(prompts[0].prompt_token_ids)), run(prompts))[1],
        )
        work = run_without_kv_cache(session, LONE, requests)
    prompt, answer = len(requests[0].prompt_token_ids), requests[0].output_len
    assert computed == list(range(prompt, prompt + answer))
    assert work.answers == expected.answers
    assert work.num_output_tokens == expected.num_output_tokens == answer
    assert len(work.gaps) == answer - 1


def test_without_a_kv_cache_is_no_use_with_a_prefix_cache(settings):
    with OfflineSession(settings) as session, pytest.raises(AssertionError):
        run_without_kv_cache(session, LONE, LONE.create(ROOM, 0))


def test_a_long_prompt_shows_in_the_tail_of_gaps():
    """By a schedule made by hand: with the long prompt, all others' gaps are 100 times as long."""
    scale = WorkloadScale(1000, 2048)
    short = LONG_PROMPT_MEANWHILE.create(scale, 0)[:-1]
    num_gaps = sum(each.output_len - 1 for each in short)
    gaps = [1.0] * (num_gaps - (len(short) - 1)) + [100.0] * (len(short) - 1)
    assert AblationWork(1.0, 1, gaps=gaps).itl_p99_ms == 100_000


def test_workloads_differ_by_seed_and_fit_small_contexts():
    for ablation in ABLATIONS:
        for context in (256, 2048):
            scale = WorkloadScale(1000, context)
            requests = ablation.workload.create(scale, 0)
            assert all(len(each.prompt_token_ids) + each.output_len <= context for each in requests)
            others = ablation.workload.create(scale, 10)
            prompts = {each.prompt_token_ids[:8] for each in requests}
            assert prompts.isdisjoint(each.prompt_token_ids[:8] for each in others)


def test_work_is_described():
    assert describe(LONE.create(WorkloadScale(1000, 2048), 0)) == "1 × 128 + 32"
    assert describe(UNEVEN_ANSWERS.create(WorkloadScale(1000, 2048), 0)) == "16 × 32 + 8–64"


def work(seconds, answer=(1,), gaps=()):
    return AblationWork(seconds, 10, [0.1], [], list(gaps), {"0": list(answer)})


def test_worth_is_the_ratio_of_one_turn():
    ablation = by_name("batching")
    result = AblationResult(ablation, "", [work(1), work(2)], [work(4), work(4)], True)
    assert result.spreads(OUTPUT_TPS) == (
        MedianRange(7.5, 5, 10),
        MedianRange(2.5, 2.5, 2.5),
        MedianRange(3, 2, 4),
    )
    assert result.spreads(ITL_P99) is None


def test_for_latencies_less_is_better():
    result = AblationResult(
        by_name("chunked-prefill"), "", [work(1, gaps=[0.1])], [work(1, gaps=[0.3])], True
    )
    assert result.worth.median == pytest.approx(3)


def test_answers_are_compared():
    def said(on, off, is_promised):
        result = AblationResult(by_name("batching"), "", [work(1, on)], [work(1, off)], is_promised)
        return result.same_answers, result.num_same_answers

    assert said((1, 2), (1, 2), True) == ("yes", 1)
    assert said((1, 2), (1, 3), True) == ("no", 0)
    assert said((1, 2), (1, 3), False) == ("not promised", 0)


def test_what_the_user_has_switched_off_is_not_measured(settings):
    with OfflineSession(
        replace(settings, enable_prefix_caching=False, batching="static")
    ) as session:
        study = AblationStudy(session)
        assert study.why_not(by_name("prefix-cache")) == "these settings are without it"
        assert study.why_not(by_name("continuous-batching")) == "these settings are without it"
        assert study.why_not(by_name("kv-cache")) is None


def test_settings_of_the_user_stay(tiny_model):
    given = EngineArgs(model=str(tiny_model), max_num_seqs=3, threads=1, kv_cache_memory="1MiB")
    assert ablation_settings(given) == given


def test_names():
    assert [each.name for each in choose_ablations(["threads", "kv-cache"])] == [
        "kv-cache",
        "threads",
    ]
    with pytest.raises(ConfigError, match="no ablation 'kvcache'.*kv-cache"):
        choose_ablations(["kvcache"])
