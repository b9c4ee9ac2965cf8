"""Heads under what an engine does to requests: forks, preemption, multi-step, engine folders."""

from __future__ import annotations

import sys

import pytest
from faults import FaultyScheduler, every
from tiny_heads import TARGET, engine_of, requests, run, save_head

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.writer import build_engine_folder
from octavo.speculation.head_program import HeadProgram, HeadSequences
from tests.conftest import write_tiny_model
from tests.speculation import test_eagle, test_medusa, test_redrafter

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

METHODS = {"medusa": test_medusa, "recurrent": test_redrafter, "eagle": test_eagle}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("heads") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def head_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {
        name: save_head(folder / name, kind.CONFIG, kind.tensors())
        for name, kind in METHODS.items()
    }


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests(8)).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_preemption_changes_nothing(model, head_of, plain, method):
    engine = engine_of(model, head_of[method], method)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(5))
    drafted = run(engine, requests(8))
    assert engine.scheduler.num_preemptions > 3
    assert drafted.token_ids == plain
    assert drafted.drafts


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone")
@pytest.mark.parametrize("method", METHODS)
def test_in_a_pipeline_heads_draft_the_same(model, head_of, plain, method):
    """They read hidden states of other stages, and the embedding, which is the first stage's."""
    by_known = {}
    for stages in (1, 2):
        settings = {"pipeline_parallel_size": stages, "threads": stages}
        drafted = run(engine_of(model, head_of[method], method, **settings), requests(8))
        assert drafted.token_ids == plain
        by_known[stages] = {tuple(known): draft for known, draft in drafted.drafts}
    common = by_known[1].keys() & by_known[2].keys()
    assert len(common) > 20
    assert all(by_known[1][known] == by_known[2][known] for known in common)


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_one_prompt(model, head_of, method):
    """They share blocks, copy the last, and each is drafted for by itself."""

    def forks() -> list[Request]:
        prompt, params = list(range(37)), SamplingParams(max_tokens=12, ignore_eos=True)
        leader = Request("0", prompt, params, 0.0, seed=3)
        others = [
            Request(f"{i}", prompt, params, 0.0, seed=3, sample_index=i, fork_of=leader)
            for i in (1, 2)
        ]
        return [leader, *others]

    alone = run(engine_of(model), forks()).token_ids
    drafted = run(engine_of(model, head_of[method], method), forks())
    assert drafted.token_ids == alone
    assert len(set(map(tuple, alone.values()))) == 3
    assert drafted.drafts


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_kept_of_requests_that_have_ended(model, head_of, method):
    engine = engine_of(model, head_of[method], method)
    for request in requests(4):
        engine.add(request)
    for _ in range(6):
        engine.step()
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    run(engine, requests(2))
    proposer = engine.scheduler.proposer.proposer
    kept = proposer._outputs if method == "eagle" else proposer._states._kept
    assert not kept


@pytest.mark.parametrize("method", METHODS)
def test_who_asks_for_no_drafts_gets_none(model, head_of, method):
    asked = requests(2)
    for request in asked:
        request.params = SamplingParams(
            max_tokens=20, ignore_eos=True, speculative={"enabled": False}
        )
    drafted = run(engine_of(model, head_of[method], method), asked)
    assert not drafted.drafts


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_folder_shows_its_hidden_states(model, head_of, plain, method, tmp_path):
    folder = build_engine_folder(EngineArgs(str(model)), tmp_path / "built").out
    drafted = run(engine_of(folder, head_of[method], method), requests(8))
    assert drafted.token_ids == plain
    assert len(drafted.drafts) > 20


def test_a_call_that_fails_is_logged_and_drafts_nothing(model, head_of, plain, monkeypatch, caplog):
    engine = engine_of(model, head_of["eagle"], "eagle")
    sequences = HeadProgram._sequences

    def without_blocks(self, num_rows, runs):
        made, longest, arrays = sequences(self, num_rows, runs)
        arrays[2][:] = 10**6
        return made, longest, arrays

    monkeypatch.setattr(HeadProgram, "_sequences", without_blocks)
    drafted = run(engine, requests(8))
    assert drafted.token_ids == plain
    assert not drafted.drafts
    assert "a head was not run" in caplog.text


def test_a_table_of_more_tokens_than_the_head(model, head_of):
    """The ids that a head embeds are the target's, whatever its own vocabulary."""
    engine = engine_of(model, head_of["eagle"], "eagle")
    program = engine.scheduler.proposer.proposer._program
    assert program.vocab_size == test_eagle.ROWS
    runs = HeadSequences([1], [1], [[0]])
    assert program.run(1, [0], 1, [259], runs)[0]
    assert program.run(1, [0], 1, [260], runs) == [[]]
