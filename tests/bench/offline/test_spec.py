"""Drafting beside plain decoding: figures by hand, and turns on a tiny model."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.bench.offline import spec
from octavo.bench.offline.session import OfflineSession
from octavo.bench.offline.spec import (
    Decoded,
    MeasuredStepTimes,
    SpecPlan,
    SpecRow,
    SpecStudy,
    batches_of,
    check_workload,
    requests_of,
)
from octavo.bench.spec_prompts import PROMPTS
from octavo.core.batch import Draft
from octavo.core.stats import DraftStats
from octavo.measure.statistics import MedianRange
from octavo.settings.engine import EngineArgs
from octavo.speculation.drafter import TextDrafter

TIMES = MeasuredStepTimes({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.020})


class Lookup:
    """Drafts what followed the last token before."""

    max_tokens = 4
    seconds = 0.0

    def __init__(self):
        self.asked = Counter()

    def wants(self, request):
        return True

    def propose(self, openings, batch_tokens):
        drafts = {}
        for request, scale in openings:
            self.asked[request.request_id] += 1
            *before, last = request.token_ids
            if last in before:
                place = len(before) - before[::-1].index(last)
                drafts[request.request_id] = Draft.chain(request.token_ids[place : place + scale])
        self.seconds += 1e-6
        return drafts

    def observe(self, request, draft, num_accepted):
        pass

    def observe_step(self, batch, seconds):
        pass

    def forget(self, request):
        pass


@pytest.fixture
def proposer(monkeypatch):
    """The drafter of any engine that is asked to draft."""
    proposer = Lookup()
    monkeypatch.setattr(
        "octavo.serving.load.open_drafter",
        lambda config, target: TextDrafter(lambda limits: proposer),
    )
    return proposer


@pytest.fixture
def session(tiny_model, proposer):
    args = EngineArgs(
        model=str(tiny_model), kernels="reference", spec_method="ngram", threads=1, max_num_seqs=4
    )
    with OfflineSession(args) as session:
        yield session


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    """The tiny model has room for 256 tokens, and knows bytes only."""
    texts = tuple(f"{number} one two one two" for number in range(3))
    monkeypatch.setattr(spec, "PROMPTS", {"copy": texts, "chat": texts})
    monkeypatch.setattr(spec, "_RANDOM_LENGTH", 20)


def row(*turns, drafts=None, draft_seconds=0.0, times=TIMES) -> SpecRow:
    drafts = drafts or DraftStats()
    return SpecRow("ngram", "copy", 1, 3, turns, drafts, draft_seconds, times)


def decoded(seconds, tokens, ids=((1, 2),)) -> Decoded:
    return Decoded(seconds, tokens, [list(each) for each in ids])


def test_figures_by_hand():
    found = row(
        (decoded(2.0, 20), decoded(1.0, 20)),
        (decoded(1.0, 20), decoded(1.0, 20)),
        (decoded(3.0, 20), decoded(1.0, 20)),
        drafts=DraftStats(10, 30, 15, [8, 4, 3]),
        draft_seconds=0.3,
    )
    assert found.speedup == MedianRange(pytest.approx(2), 1, pytest.approx(3))
    assert found.base_decode_tps.median == 10 and found.decode_tps.median == 20
    assert found.accepted_by_position == [0.8, 0.4, 0.3]
    document = found.as_json()
    assert document["speedup"] == 2 and document["same_tokens"] is True
    assert document["mean_accepted_length"] == 2.5 and document["acceptance_rate"] == 0.5
    assert document["draft_share"] == pytest.approx(0.1)
    assert json.loads(json.dumps(document)) == document


def test_other_tokens_are_noticed():
    assert not row((decoded(1, 2), decoded(1, 2, ids=((1, 3),)))).same_tokens


def test_nothing_drafted_is_no_error():
    found = row((decoded(1, 2), decoded(1, 2)))
    assert found.break_even_batch is None and found.accepted_by_position == []
    assert found.as_json()["acceptance_rate"] is None


def test_step_times_between_and_beyond():
    assert TIMES(1, 1) == 0.010 and TIMES(4, 2) == pytest.approx(0.020)
    assert TIMES(3, 1) == pytest.approx(0.0115)
    assert TIMES(4, 4) == pytest.approx(0.036)  # on from 4 and 8
    assert MeasuredStepTimes({1: 0.01})(8, 8) == 0.01
    assert MeasuredStepTimes({1: 0.01, 2: 0.009})(8, 8) == 0.01  # noise, not a gain


def test_break_even_of_measured_steps():
    turns = ((decoded(1, 2), decoded(1, 2)),)
    # Of three drafted tokens half are right: 2.5 tokens for a step of four rows.
    drafts = DraftStats(10, 30, 15, [8, 4, 3])
    batch = row(*turns, drafts=drafts).break_even_batch
    assert batch is not None and batch > 1
    assert 2.5 * TIMES(batch, 1) <= TIMES(batch, 4)
    assert 2.5 * TIMES(batch - 1, 1) > TIMES(batch - 1, 4)
    dear = row(*turns, drafts=drafts, draft_seconds=30 * 0.01)
    assert dear.break_even_batch == 1  # 10 ms for a drafted token: as much as a step


def test_prompts_are_there():
    assert set(PROMPTS) == {"copy", "summary", "edit", "rag", "json", "chat"}
    for prompts in PROMPTS.values():
        assert len(set(prompts)) == len(prompts) == 8
        assert all(20 < len(prompt) < 3000 for prompt in prompts)


def test_full_batches_of_different_requests(session):
    def texts(batch_size):
        found = batches_of(session, "copy", batch_size)
        assert {len(batch) for batch in found} == {batch_size}
        return [str(request.messages) for batch in found for request in batch]

    assert len(texts(1)) == 3 and len(texts(2)) == 2
    assert len(set(texts(7))) == 7  # nobody is asked the same twice


def test_workloads_of_other_kinds(session, tmp_path):
    assert len(requests_of(session, "random")) == 8
    (file := tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert check_workload(str(file)) == str(file)
    assert [request.prompt for request in requests_of(session, str(file))] == ["one", "two"]
    with pytest.raises(ConfigError, match="has 2 requests, and a batch takes 4"):
        batches_of(session, str(file), 4)
    with pytest.raises(ConfigError, match="none of copy, "):
        check_workload(str(tmp_path / "nothing"))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_turn_of_each(session, proposer, batch_size):
    asked = []
    plan = SpecPlan(("copy",), (batch_size,), max_tokens=24, repeat=2)
    study = SpecStudy(session, "ngram", plan)
    assert not proposer.asked  # steps are measured without drafts
    assert set(study.step_times.seconds_of) == {1, 2, 4}
    found = study.measure("copy", batch_size, lambda: asked.append(1))
    assert len(asked) == len(found.turns) == 2
    assert found.same_tokens and found.num_requests == 3
    assert 0 < found.drafts.num_accepted < found.drafts.num_tokens
    for plain, drafted in found.turns:
        assert len(plain.token_ids) == 3
        assert plain.seconds > 0 and drafted.seconds > 0
    if batch_size == 1:  # all tokens but the first of each answer are decoded
        total = sum(map(len, found.turns[0][0].token_ids))
        assert [each.num_tokens for each in found.turns[0]] == [total - 3] * 2
    assert found.draft_seconds == pytest.approx(proposer.seconds, abs=1e-4)


def test_plain_requests_are_not_drafted_for_and_nothing_is_shared(session, proposer, monkeypatch):
    plan = SpecPlan(("copy",), max_tokens=8, repeat=1)
    study = SpecStudy(session, "ngram", plan)
    runs = []
    run = session.run

    def watch(requests, **options):
        before = sum(proposer.asked.values())
        timing = run(requests, **options)
        was_asked = sum(proposer.asked.values()) > before
        (params,) = map(options["ask"], requests)
        assert was_asked == params.speculative.enabled
        assert all(stats.num_cached_tokens == 0 for stats in timing.requests)
        runs.append((options["cache_salt"], was_asked))
        return timing

    monkeypatch.setattr(session, "run", watch)
    study.measure("copy", 1)
    assert len({salt for salt, _ in runs}) == len(runs) == 2 + 2 * 3
    # A warm-up of each, and then turns in which who begins changes.
    assert [drafted for _, drafted in runs[2:]] == [False, True, True, False, False, True]


def test_random_answers_are_the_same_at_their_temperature(session):
    plan = SpecPlan(("random",), max_tokens=12, repeat=1)
    found = SpecStudy(session, "ngram", plan).measure("random", 1)
    assert found.same_tokens
    assert all(len(ids) == 12 for ids in found.turns[0][0].token_ids)


def test_answers_that_end_at_once(session, monkeypatch):
    plan = SpecPlan(("copy",), max_tokens=1, repeat=1)
    with pytest.raises(BenchmarkError, match="nothing was decoded"):
        SpecStudy(session, "ngram", plan).measure("copy", 1)


def test_a_batch_that_the_engine_does_not_take(session):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SpecStudy(session, "ngram", SpecPlan(("copy",), (8,)))
