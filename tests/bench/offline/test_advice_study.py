"""Changes that are tried out in turns, on engines that answer at once and say how long it took."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.offline.advice_study import (
    AdviceLoad,
    AdviceStudy,
    TrialOutcome,
    TrialRun,
    TriedAdvice,
    advice_without_formula,
    settings_for,
)
from octavo.bench.offline.session import RunTiming
from octavo.core.stats import RequestStats
from octavo.planner.advice import Advice, AdviceTrial
from octavo.settings.engine import EngineArgs

LOAD = AdviceLoad(count=2, input_len=40, output_len=8)


class Session:
    """Takes a second, or what ``seconds_of`` says of its settings."""

    vocab_size = 300
    tokenizer = SimpleNamespace(stop_token_ids=(), chat_template=None)

    def __init__(self, args, log, seconds_of=lambda args: 1.0):
        self.args, self.log, self.seconds = args, log, seconds_of(args)
        self.is_open = True

    def run(self, requests, *, cache_salt):
        self.log.append((self, tuple(requests), cache_salt))
        stats = [
            RequestStats(0.0, 1, request.output_len, 0, 0, 0.0, self.seconds / 2, self.seconds)
            for request in requests
        ]
        return RunTiming(self.seconds, stats, [])

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.is_open = False


class Bench:
    """A study, what its engines were given, and those that were opened."""

    def __init__(self, seconds_of=lambda args: 1.0, seconds=0.0):
        self.log, self.opened = [], []
        self.seconds_of = seconds_of
        self.base = Session(EngineArgs("m", threads=2), self.log, seconds_of)
        self.study = AdviceStudy(self.base, LOAD, seconds, self.open)

    def open(self, args):
        self.opened.append(Session(args, self.log, self.seconds_of))
        return self.opened[-1]


def advice(trial) -> Advice:
    return Advice("do it", "so", "much", trial)


def outcome(*quotients: float) -> TrialOutcome:
    return TrialOutcome(
        tuple((TrialRun(10.0, 1.0, 1.0), TrialRun(10.0 * q, 1.0, 1.0)) for q in quotients)
    )


def test_the_gain_is_that_of_turns():
    bench = Bench(lambda args: 0.5 if args.kv_cache_dtype == "int8" else 1.0)
    found = bench.study.measure(AdviceTrial({"kv_cache_dtype": "int8"}))
    assert found.gain.value == found.gain.low == found.gain.high == 2.0
    assert found.gain.source == "measured" and found.helps
    assert found.before == TrialRun(16.0, 500.0, 1000.0) and found.after == TrialRun(
        32.0, 250.0, 500.0
    )
    assert len(found.turns) == 3  # though there was no time for them


def test_a_middle_and_its_ends():
    found = outcome(1.5, 0.9, 1.2)
    assert (found.gain.low, found.gain.value, found.gain.high) == (0.9, 1.2, 1.5)
    assert not found.helps and outcome(1.01, 1.2).helps


def test_who_begins_changes_and_nothing_is_known_from_before():
    bench = Bench()
    bench.study.measure(AdviceTrial({"threads": 1}))
    order = ["base" if session is bench.base else "changed" for session, _, _ in bench.log]
    turns = ["base", "changed", "changed", "base", "base", "changed"]
    assert order == ["base", "changed", *turns]  # the first two warm up
    bench.study.measure(AdviceTrial({"threads": 1}))
    order = ["base" if session is bench.base else "changed" for session, _, _ in bench.log]
    assert order[8:] == ["changed", *turns]  # the other is warm
    assert len({salt for _, _, salt in bench.log}) == len(bench.log)
    assert len({requests for _, requests, _ in bench.log}) == 1


def test_the_changed_engine_is_closed_and_the_other_is_not():
    bench = Bench()
    bench.study.measure(AdviceTrial({"threads": 1}))
    (changed,) = bench.opened
    assert changed.args.threads == 1 and changed.args.model == "m"
    assert bench.base.is_open and not changed.is_open


def test_what_prompts_share_is_known_before_the_clock_starts():
    bench = Bench()
    bench.study.measure(AdviceTrial(shared_prefix=30))
    assert bench.opened == []
    plain, beginning, batch = bench.log[:3]
    assert beginning[2] == batch[2] != plain[2]
    (first,) = beginning[1]
    assert first.output_len == 1 and len(first.prompt_token_ids) == 31
    for request in batch[1]:
        assert request.prompt_token_ids[:30] == first.prompt_token_ids[:30]
    assert {len(each.prompt_token_ids) for each in (*batch[1], *plain[1])} == {40}
    assert len({each.prompt_token_ids[:30] for each in plain[1]}) == 2


def test_drafts_are_made_of_texts():
    bench = Bench()
    bench.study.measure(AdviceTrial({"spec_method": "auto"}, on_text=True))
    requests = [request for _, some, _ in bench.log for request in some]
    assert all(request.prompt and request.output_len == 8 for request in requests)
    assert len({request.prompt for request in requests}) == 3 * LOAD.count


def test_what_cannot_be_tried_says_why():
    assert Bench().study.tried(advice("it takes a moon")).why_not == "it takes a moon"

    def refuses(args):
        if args.threads == 1:
            raise ConfigError("one is too few")
        return 1.0

    found = Bench(refuses).study.tried(advice(AdviceTrial({"threads": 1})))
    assert found.outcome is None and "one is too few" in found.why_not
    assert found.as_json()["measured_gain"] is None


def test_what_helped_comes_first_and_what_did_not_last():
    some = [
        TriedAdvice(advice("words"), outcome=outcome(0.9)),
        TriedAdvice(advice("words"), why_not="no"),
        TriedAdvice(advice("words"), outcome=outcome(1.2)),
        TriedAdvice(advice("words"), outcome=outcome(1.5)),
    ]
    order = sorted(some, key=lambda each: each.order)
    assert order == [some[3], some[2], some[1], some[0]]


def test_what_no_formula_foresees():
    lone, several = AdviceLoad(1, 8, 8), AdviceLoad(4, 8, 8)
    args = EngineArgs("m", threads=4).serving()
    names = [set(each.trial.settings) for each in advice_without_formula(args, several)]
    assert names == [{"threads"}, {"kv_cache_dtype"}, {"itl_target_ms"}]
    assert {"itl_target_ms"} not in [
        set(each.trial.settings) for each in advice_without_formula(args, lone)
    ]
    single = EngineArgs("m", threads=1, kv_cache_dtype="int8")
    assert advice_without_formula(single, several) == []


@pytest.mark.parametrize("longest, expected", [(100_000, 5016 + 8), (2048, 2048)])
def test_there_is_room_for_all_requests(longest, expected):
    settings = settings_for(EngineArgs("m"), AdviceLoad(2, 5000, 8), longest)
    assert settings.max_model_len == expected and settings.threads
    given = settings_for(EngineArgs("m", max_model_len=70, threads=3), LOAD, longest)
    assert (given.max_model_len, given.threads) == (70, 3)
